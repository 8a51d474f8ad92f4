"""The memory of one step after the other, which every callback here is made of."""

from __future__ import annotations

import importlib
import os
from typing import Any

from vramx.memory.track import Track, Tracked, track

PEAK, PEAK_RESERVED = "vram_peak_bytes", "vram_peak_reserved_bytes"


class StepMemory:
    """Tracks steps, and records the run where a file is named.

    last: the step that ended last, None before the first.
    highest: the step with the highest peak.

    Args:
        record: a file for `vramx.record`, which is written when training ends.
    """

    def __init__(self, record: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.last: Tracked | None = None
        self.highest: Tracked | None = None
        self._record = record
        self._recorder: Any = None
        self._open: tuple[Track, Tracked] | None = None

    def begin_run(self, model: Any = None, optimizer: Any = None) -> None:
        """Start the recording, if there is to be one."""
        self.end_step()
        if self._record is not None and self._recorder is None:
            record = importlib.import_module("vramx.memory.record").record
            self._recorder = record(self._record, model, optimizer)
            self._recorder.__enter__()

    def end_run(self, error: BaseException | None = None) -> None:
        """End the step that is open and the recording, and write it.

        Args:
            error: what ended the run; that a recording cannot be written is then only a warning.
        """
        self.end_step()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(type(error) if error is not None else None, error, None)

    def begin_step(self) -> None:
        """Begin a step, and end the one before it if that is open."""
        self.end_step()
        region = track("step")
        self._open = region, region.__enter__()

    def end_step(self) -> None:
        """End the step that is open; its figures are those of `last`."""
        if self._open is None:
            return
        (region, tracked), self._open = self._open, None
        region.__exit__(None, None, None)
        self.last = tracked
        if self.highest is None or tracked.peak_bytes > self.highest.peak_bytes:
            self.highest = tracked

    def figures(self) -> dict[str, float]:
        """Return what a log gets of the last step; nothing where CUDA is not used."""
        if self.last is None or self.last.device is None:
            return {}
        return {
            PEAK: float(self.last.peak_bytes),
            PEAK_RESERVED: float(self.last.peak_reserved_bytes),
        }
