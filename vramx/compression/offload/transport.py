"""Streams, events and copies between a GPU and its host, as the stash needs them.

The one place of offloading that calls CUDA. Transport is what a stash is given; CudaTransport is
the real one. The host waits in synchronize() alone. One transport a device; its two lanes, one for
each direction, are streams of their own that run their copies in order. A call costs some
microseconds.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import torch
from torch import Tensor


class Lane(enum.Enum):
    """A direction of the link. Copies of one lane run in the order in which they were asked for."""

    TO_HOST = "to the host"
    TO_DEVICE = "to the device"


class Transport(Protocol):
    """What moves bytes. A stream or an event is whatever the transport says it is."""

    def stream(self) -> Any:
        """Return the stream that the calling thread's work goes to."""

    def capturing(self) -> bool:
        """Tell whether that stream is being captured into a graph."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return device memory that belongs to the current stream."""

    def pin(self, nbytes: int) -> Tensor:
        """Return pinned host memory; raises RuntimeError where there is none left."""

    def mark(self, place: Any, *, timed: bool = False) -> Any:
        """Return an event after all that a stream, or a lane, has been asked for until now."""

    def wait(self, place: Any, event: Any) -> None:
        """Have what a stream, or a lane, is asked for from now on start after the event."""

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        """Ask a lane for a copy."""

    def used_by(self, memory: Tensor, place: Any) -> None:
        """Keep device memory from being given away before the work of a stream, or a lane."""

    def done(self, event: Any) -> bool:
        """Tell whether an event has happened, without waiting for it."""

    def synchronize(self, event: Any) -> None:
        """Have the host wait until an event has happened."""

    def milliseconds(self, start: Any, end: Any) -> float:
        """Return the device's time between two timed events that are done."""


class CudaTransport:
    """The link of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = {lane: torch.cuda.Stream(device) for lane in Lane}

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pin(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def mark(self, place: Lane | torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self._stream_of(place))
        return event

    def wait(self, place: Lane | torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self._stream_of(place).wait_event(event)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.stream(self._lanes[lane]):
                target.copy_(source, non_blocking=True)
            return
        # On the device itself the context manager takes longer than the launch of the copy.
        stream = torch.cuda.current_stream()
        torch.cuda.set_stream(self._lanes[lane])
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(stream)

    def used_by(self, memory: Tensor, place: Lane | torch.cuda.Stream) -> None:
        memory.record_stream(self._stream_of(place))

    def done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))

    def _stream_of(self, place: Lane | torch.cuda.Stream) -> torch.cuda.Stream:
        return self._lanes[place] if isinstance(place, Lane) else place
