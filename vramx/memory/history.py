"""The history of a device's allocations: where a recorder gets it from, and on which clock.

A source is all of CUDA that recording needs, so that tests record a CPU. The one here is torch's
own history, `torch.cuda.memory._record_memory_history`; behind vramx's allocator it has vramx's
events too. Its times are a counter's, which torch turns into those of the day once, at the end; so
every now and then a source allocates a few bytes at a known time (a tick), and the ticks tell one
clock by the other to about a microsecond.
"""

from __future__ import annotations

import inspect
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from vramx.errors import VramxError
from vramx.memory import workspaces

clock_ns = time.perf_counter_ns
# Odd, and so nobody else's: what is matched first is the address, and then the size.
TICK_BYTES = 499
# Of one whose time is not known better than to the day's clock, which may have been set meanwhile.
_COARSE_ERROR_US = 200.0


class Tick(NamedTuple):
    """A small allocation that was made between two times of `clock_ns`, and the day's time then."""

    begin_ns: int
    end_ns: int
    epoch_ns: int
    address: int


class HistorySource(Protocol):
    """A device type's allocations, recorded from start() to finish()."""

    device_type: str

    def start(self, max_entries: int, stacks: str) -> None: ...
    def tick(self) -> Tick | None:
        """Allocate and free TICK_BYTES; None where that cannot be done now."""

    def finish(self) -> dict[str, Any]:
        """End the recording and return a snapshot, laid out as torch's."""

    def workspace_sizes(self) -> tuple[int, ...]: ...
    def outside_bytes(self) -> list[int]:
        """Return, for each device, the bytes in use that no allocator of this process holds."""


class CudaHistory:
    """torch's own history, of all GPUs."""

    device_type = "cuda"

    def start(self, max_entries: int, stacks: str) -> None:
        """Begin to record.

        Raises:
            VramxError: there is no GPU, its history is recorded already, or torch's allocator has
                been replaced by one that keeps none.
        """
        import torch

        if not torch.cuda.is_available():
            raise VramxError("there is no CUDA device to record; vramx.predict needs none")
        torch.cuda.init()
        record = torch.cuda.memory._record_memory_history
        clears = "clear_history" in inspect.signature(record).parameters
        try:
            if getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)():
                raise VramxError(
                    "torch's history is being recorded already; end that recording before this one"
                )
            record(
                "all",
                context="alloc",
                stacks=stacks,
                max_entries=max_entries,
                **({"clear_history": True} if clears else {}),
            )
        except RuntimeError as error:
            raise VramxError(f"the allocator behind torch keeps no history: {error}") from None

    def tick(self) -> Tick | None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None
        begin_ns = clock_ns()
        try:
            # No tensor: the program may be within a transform, a trace or a mode that would see it.
            address = torch.cuda.caching_allocator_alloc(TICK_BYTES)
        except torch.OutOfMemoryError:
            return None
        tick = Tick(begin_ns, clock_ns(), time.time_ns(), address)
        torch.cuda.caching_allocator_delete(address)
        return tick

    def finish(self) -> dict[str, Any]:
        import torch

        try:
            snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return snapshot

    def workspace_sizes(self) -> tuple[int, ...]:
        return workspaces.workspace_sizes()

    def outside_bytes(self) -> list[int]:
        import torch

        found = []
        for device in range(torch.cuda.device_count()):
            # Asking makes a context, of hundreds of MiB, on a device that has none.
            reserved = torch.cuda.memory_reserved(device)
            free, total = torch.cuda.mem_get_info(device) if reserved else (0, 0)
            found.append(max(total - free - reserved, 0))
        return found


class Clock(NamedTuple):
    """Turns times of `clock_ns` into a history's, in us, and says how far off they may be."""

    to_us: Callable[[float], float]
    error_us: float


def clock_of(ticks: Sequence[Tick], entries: Sequence[tuple[int, float]]) -> Clock:
    """Return the clock that ticks tell.

    Args:
        ticks: in order of time.
        entries: address and time in us of the history's allocations of TICK_BYTES, in order.
    """
    pairs = [
        ((tick.begin_ns + tick.end_ns) / 2, when_us + 0.5, (tick.end_ns - tick.begin_ns) / 2000)
        for tick, when_us in _matched(ticks, entries)
    ]
    if not pairs:
        known = ticks or (Tick(clock_ns(), clock_ns(), time.time_ns(), 0),)
        pairs = [(tick.end_ns, tick.epoch_ns / 1000, _COARSE_ERROR_US) for tick in known]
    # One that was interrupted (by a collection, by another thread) says less than its neighbours.
    usual = sorted(error for *_, error in pairs)[len(pairs) // 2]
    pairs = [pair for pair in pairs if pair[2] <= 2 * usual]
    begins, times, errors = zip(*pairs, strict=True)
    return Clock(_Line(begins, times), max(errors) + 1.0)  # the history has whole microseconds


def _matched(
    ticks: Sequence[Tick], entries: Sequence[tuple[int, float]]
) -> list[tuple[Tick, float]]:
    """Return the ticks that the history still has, with their times: of each address the last."""
    by_address: dict[int, list[float]] = {}
    for address, when_us in entries:
        by_address.setdefault(address, []).append(when_us)
    matched = []
    for tick in reversed(ticks):
        if left := by_address.get(tick.address):
            matched.append((tick, left.pop()))
    return matched[::-1]


class _Line:
    """Straight between known points, and of slope 1 (1 us in 1000 ns) beyond them."""

    def __init__(self, begins_ns: Sequence[float], times_us: Sequence[float]) -> None:
        self._begins, self._times = begins_ns, times_us

    def __call__(self, time_ns: float) -> float:
        begins, times = self._begins, self._times
        place = bisect_left(begins, time_ns)
        if place == 0:
            return times[0] + (time_ns - begins[0]) / 1000
        if place == len(begins):
            return times[-1] + (time_ns - begins[-1]) / 1000
        share = (time_ns - begins[place - 1]) / (begins[place] - begins[place - 1])
        return times[place - 1] + share * (times[place] - times[place - 1])
