"""The most that this process held of each device, in a file when it ends: for `explain --confirm`.

From torch's own counters, so that it is the same under vramx and under torch's allocator. A program
that sets the counters back, as `vramx.track` does, has what they said before taken down first.
A file for each process, under its number; one that is killed writes none.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from vramx.allocator.install import allocator_installed

SUFFIX = ".json"
_SET_BACK = "_cuda_resetPeakMemoryStats"


class Peaks:
    """The peaks of reserved bytes by device."""

    def __init__(self, torch: ModuleType, folder: Path) -> None:
        self._torch = torch
        self._file = folder.absolute() / f"{os.getpid()}{SUFFIX}"
        self._pid = os.getpid()
        self._bytes: dict[int, int] = {}

    def take_down(self) -> None:
        """Read the counters of every device; an allocator in plain mode has none."""
        with contextlib.suppress(RuntimeError):
            for device in range(self._torch.cuda.device_count()):
                peak = int(self._torch.cuda.max_memory_reserved(device))
                self._bytes[device] = max(peak, self._bytes.get(device, 0))

    def write(self) -> None:
        """Write what was taken down, unless this is a fork of who was to."""
        if os.getpid() == self._pid:
            self.take_down()
            served_by = "vramx" if allocator_installed() else "torch"
            self._file.write_text(json.dumps({"allocator": served_by, "bytes": self._bytes}))


def write_at_exit(torch: ModuleType, folder: Path) -> None:
    """Have this process write its peaks when Python ends; CUDA is initialised."""
    peaks = Peaks(torch, folder)
    set_back = getattr(torch._C, _SET_BACK)

    @functools.wraps(set_back)
    def taken_down(device: int) -> None:
        peaks.take_down()
        set_back(device)

    setattr(torch._C, _SET_BACK, taken_down)
    atexit.register(peaks.write)


@dataclass(frozen=True)
class Held:
    """What the processes of a command held."""

    peak_bytes: int | None  # the most of any process, of any device; None where none said
    allocators: frozenset[str]  # "vramx", "torch"


def read(folder: Path) -> Held:
    """Return what the files in a folder say together."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*{SUFFIX}")]
    peaks = [peak for each in found for peak in each["bytes"].values()]
    return Held(max(peaks, default=None), frozenset(each["allocator"] for each in found))
