"""A torch memory snapshot: what was allocated, by which line, and what was held at any event.

Built on numpy, without torch, so that a file from a cluster is read on a laptop. An event is a
position in the recording, from 0, as torch's own viewer counts; what is said of an event holds
after it, and event -1 is the time before the first. Memory counts as live until torch may use it
again (`free_completed`). All values are read-only; a query looks at each row at most once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vramx.errors import InvalidValueError, TraceError, brief
from vramx.memory.blocks import exact_block_bytes
from vramx.memory.segments import Hole, PoolId, Segment, SegmentEvent, holes_in, regions_at
from vramx.memory.stacks import Stack
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, Trace, is_trace_file, path_of

Ids = npt.NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Allocations:
    """Every allocation, by its id: those from before the recording first, then in order."""

    address: npt.NDArray[np.uint64]
    size: npt.NDArray[np.int64]  # requested bytes
    block_bytes: npt.NDArray[np.int64]  # what it takes: recorded if alive at the end, else rounded
    stream: npt.NDArray[np.uint8]  # number in Snapshot.streams
    stack: npt.NDArray[np.int64]  # number in Snapshot.stacks
    pool: npt.NDArray[np.int64]  # number in pools
    pools: tuple[PoolId, ...]
    category: npt.NDArray[np.int64]  # number in Snapshot.categories
    label: npt.NDArray[np.int64]  # number in Snapshot.labels


@dataclass(frozen=True)
class FailedRequest:
    """A request that ended in OutOfMemoryError (an `oom` entry)."""

    id: int  # as an allocation, which a replay has to serve
    event: int
    size_bytes: int
    device_free_bytes: int | None  # as the driver said then; None where it was not recorded
    stream: int
    pool: PoolId
    stack: Stack


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One device's part of a snapshot.

    trace: its allocations and frees as arrays, for replays; `event` has the position in the
        recording of each of its rows, -1 for memory from before it.
    streams: the raw streams by their number in the trace.
    segments, segment_events: what was held from the driver at the end, and how it came.
    failures: the requests that ended in OutOfMemoryError, in order.
    settings: torch's `allocator_settings`, unchecked.
    unknown_actions: of events that are not known, and were passed over.
    categories, labels: what memory is for, and whose it is (a module, a tensor's name), where
        vramx.record wrote the file; the first of each, "", is what nothing is said of.
    outside_bytes: of the device, held by no allocator of the process; None where it is not known.
    """

    trace: Trace
    event: npt.NDArray[np.int64]
    event_count: int
    start_us: int
    allocations: Allocations
    stacks: tuple[Stack, ...]
    streams: tuple[int, ...]
    segments: tuple[Segment, ...]
    segment_events: tuple[SegmentEvent, ...]
    failures: tuple[FailedRequest, ...]
    settings: Mapping[str, Any]
    unknown_actions: tuple[str, ...] = ()
    categories: tuple[str, ...] = ("",)
    labels: tuple[str, ...] = ("",)
    outside_bytes: int | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: int | None = None) -> Snapshot:
        """Read a torch memory snapshot (.pickle, .pkl, .json, each also .gz); run nothing in it.

        Args:
            path: the file; its content decides what it is, not its name.
            device: of a snapshot of several devices, the one that is wanted; by default the one
                that ran out of memory, else the one with the most events.

        Raises:
            InvalidValueError: the path is none.
            TraceError: the file cannot be read, is damaged, asks for code, holds no events, or is
                no snapshot; the text does not repeat its name.

        Example:
            >>> snapshot = vramx.Snapshot.load("oom.pickle")         # doctest: +SKIP
            >>> request = snapshot.failures[-1]                      # doctest: +SKIP
            >>> request.size_bytes, snapshot.live_bytes_at(request.event)   # doctest: +SKIP
            (536870912, 2638766084)
        """
        from vramx.memory.snapshot_reader import read_snapshot

        file = path_of(path)
        if is_trace_file(file):
            raise TraceError(
                "it is a trace (.npz), which has no stacks; a torch memory snapshot is needed"
            )
        return read_snapshot(file, device)

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.trace.name

    @property
    def end_event(self) -> int:
        """The last event."""
        return self.event_count - 1

    @property
    def recorded_policy(self) -> str:
        """The policy, as replays name it, of the allocator that was recorded."""
        setting = self.settings.get("expandable_segments")
        is_mapped = any(segment.is_expandable for segment in self.segments) or any(
            change.is_mapping for change in self.segment_events
        )
        if setting is True or (setting is None and is_mapped):
            return "expandable"
        # Torch's own maps by that setting alone; what does without it is vramx behind torch.
        return "vramx" if is_mapped else "native"

    @property
    def has_categories(self) -> bool:
        """Whether the file says what memory is for."""
        return len(self.categories) > 1

    @cached_property
    def peak_event(self) -> int:
        """The event after which the most was live; of requests that failed nothing was."""
        return int(self.event[int(self._live_bytes.argmax())])

    def check_event(self, event: int) -> int:
        """Return an event that exists.

        Raises:
            InvalidValueError: it does not.
        """
        if not isinstance(event, (int, np.integer)) or not -1 <= event < self.event_count:
            raise InvalidValueError(
                f"event {brief(event)} is not in {self.name}; accepted are -1 to {self.end_event}"
            )
        return event

    def live_bytes_at(self, event: int) -> int:
        """Return the requested bytes that were live after an event."""
        rows = self._rows_until(event)
        return int(self._live_bytes[rows - 1]) if rows else 0

    def live_at(self, event: int) -> Ids:
        """Return the ids of the allocations that were live after an event, in their order."""
        rows = self._rows_until(event)
        born, gone = self._lives
        return np.flatnonzero((born < rows) & (gone >= rows))

    def reserved_bytes_at(self, events: int | Ids) -> Any:
        """Return the bytes held from the driver after an event, or after each of several."""
        changes, totals = self._reserved
        return totals[np.searchsorted(changes, events, side="right")]

    @cached_property
    def peak_reserved_bytes(self) -> int:
        """The most that was held from the driver."""
        return int(self._reserved[1].max())

    def holes_at(self, event: int) -> list[Hole]:
        """Return the free memory that was held after an event, the largest hole first."""
        ids = self.live_at(event)
        blocks = self.allocations
        ids = ids[np.argsort(blocks.address[ids], kind="stable")]
        spans = zip(blocks.address[ids].tolist(), self.block_bytes[ids].tolist(), strict=True)
        regions = regions_at(self.segments, self.segment_events, event)
        return sorted(holes_in(regions, spans), key=lambda hole: -hole.size_bytes)

    @property
    def rows_of_allocation(self) -> Ids:
        """The row of the trace in which each allocation was made, by its id."""
        return self._lives[0]

    def rows_until(self, failure: FailedRequest) -> Ids:
        """Return the rows of the trace up to that of one failed request, which is the last.

        Requests that failed before it are left out: the program went on without them.
        """
        trace = self.trace
        earlier = [other.id for other in self.failures if other.id != failure.id]
        kept = np.flatnonzero(~np.isin(trace.id, earlier))
        return kept[: np.flatnonzero(trace.id[kept] == failure.id)[0] + 1]

    def _rows_until(self, event: int) -> int:
        return int(np.searchsorted(self.event, self.check_event(event), side="right"))

    @cached_property
    def block_bytes(self) -> Ids:
        """What each allocation took, by its id: all of the block that it was given."""
        return exact_block_bytes(self)

    @cached_property
    def peak_block_bytes(self) -> int:
        """The most that blocks took at once: torch's peak of allocated bytes."""
        return int(self._running_sum(self.block_bytes[self.trace.id]).max())

    @cached_property
    def _live_bytes(self) -> npt.NDArray[np.int64]:
        """Live bytes after each row."""
        return self._running_sum(self.trace.size.astype(np.int64))

    def _running_sum(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return what is live after each row, of the size of each row's allocation."""
        trace = self.trace
        sign = np.where(trace.op == ALLOCATE, 1, np.where(trace.op == FREE_COMPLETED, -1, 0))
        sign[np.isin(trace.id, trace.failed)] = 0
        live: npt.NDArray[np.int64] = (sign * sizes).cumsum()
        return live

    @cached_property
    def _lives(self) -> tuple[Ids, Ids]:
        """The row in which each allocation was made, and that in which it ended."""
        trace, count = self.trace, len(self.allocations.size)
        born, gone = np.zeros(count, np.int64), np.full(count, _NEVER)
        rows = np.arange(len(trace))
        for op, when in ((ALLOCATE, born), (FREE_COMPLETED, gone)):
            chosen = trace.op == op
            when[trace.id[chosen]] = rows[chosen]
        return born, gone

    @cached_property
    def _reserved(self) -> tuple[Ids, Ids]:
        """The events at which the bytes held changed, and what they were before and after each."""
        at_end = sum(segment.size_bytes for segment in self.segments)
        changes = [
            each.size_bytes if each.is_growth else -each.size_bytes for each in self.segment_events
        ]
        totals = np.array([0, *changes], np.int64).cumsum()
        totals += at_end - totals[-1]
        return np.array([each.event for each in self.segment_events], np.int64), totals.clip(0)


def check_snapshot(snapshot: Any) -> Snapshot:
    """Return a snapshot, or raise InvalidValueError for what is none."""
    if not isinstance(snapshot, Snapshot):
        raise InvalidValueError(f"snapshot {brief(snapshot)} is not accepted; a Snapshot is")
    return snapshot
