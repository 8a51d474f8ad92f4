"""Turns the plain data of a torch memory snapshot into a Snapshot.

A snapshot names memory by address and holds only the last events, so four things are put right:
addresses, which are reused, become allocation ids; memory that was allocated before the recording
began (freed later without an allocation, or still alive at the end without one) is allocated at
the start; streams, which are raw pointers, become 0, 1, ... in order of appearance; a request that
failed (`oom`) is an allocation that is freed at once, so that whoever replays it has to serve it.
Memory counts as reusable from `free_completed`.

The reader is tolerant, because the format gains fields with every torch: unknown keys and unknown
actions are passed over, and the actions are noted. About 1 s for 100 000 events, half of it the
unpickling.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vramx.errors import TraceError, brief
from vramx.memory.attribution import Attribution
from vramx.memory.blocks import rounded
from vramx.memory.segment_reader import SEGMENT_ACTIONS, pool_of, read_segment, read_segment_event
from vramx.memory.segments import DEFAULT_POOL, Block, PoolNumbers, Segment, SegmentEvent
from vramx.memory.snapshot import Allocations, FailedRequest, Snapshot
from vramx.memory.snapshot_file import (
    MOST_BYTES,
    as_list,
    byte_count,
    events_of_device,
    field,
    number,
    number_or,
    read_snapshot_file,
)
from vramx.memory.stacks import StackTable
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, FREE_REQUESTED, Trace

_MAX_STREAMS = 256
_MAX_TIME_US = (1 << 32) - 1
# They are of no memory.
_PASSED_OVER = frozenset({"snapshot", "annotate"})


def read_snapshot(path: Path, device: int | None = None) -> Snapshot:
    """Read a snapshot file: a pickle or JSON, either of them also gzipped.

    Args:
        device: the ordinal whose events are wanted; by default that which ran out of memory,
            else that with the most events.

    Raises:
        TraceError: the file is neither, is damaged, asks for code, or holds no events.
    """
    with _collector_paused():
        snapshot = read_snapshot_file(path)
        chosen, records = events_of_device(snapshot, device)
        builder = _Builder(Attribution.read(snapshot, chosen))
        for position, record in enumerate(records):
            builder.add(record, position)
        builder.add_segments(snapshot["segments"], chosen)
        settings = snapshot.get("allocator_settings")
        return builder.finish(path.name, chosen, settings if isinstance(settings, dict) else {})


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking millions of new objects, none of them garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True, eq=False)
class _Allocation:
    """An allocation while the events are read."""

    address: int
    size: int
    stream: int
    stack: int
    pool: tuple[int, ...] | None = None
    free_requested: bool = False
    category: int = 0
    label: int = 0
    id: int = -1  # known at the end: those that predate the recording come first


class _Builder:
    """Follows the events by address, of one device; a pass over them, of about 3 us each."""

    def __init__(self, attribution: Attribution) -> None:
        self._attribution = attribution
        self._live: dict[int, _Allocation] = {}
        self._recorded: list[_Allocation] = []
        self._baseline: list[_Allocation] = []
        self._rows: list[tuple[int, _Allocation, int, int]] = []  # op, time and position
        self._failed: list[tuple[_Allocation, dict[str, Any], int]] = []  # with its event
        self._streams: dict[int, int] = {0: 0}
        self._stacks = StackTable()
        self._segments: list[Segment] = []
        self._block_bytes: dict[int, int] = {}  # by the address of a block alive at the end
        self._segment_events: list[SegmentEvent] = []
        self._unknown: set[str] = set()
        self._events = 0

    def add(self, record: Any, position: int) -> None:
        self._events = position + 1
        action = record.get("action") if type(record) is dict else None
        if action is None:
            action = field(record, "action", "event", position)
        if action == "alloc":
            self._allocate(record, position)
        elif action == "free_requested":
            self._request_free(record, position)
        elif action == "free_completed":
            self._complete_free(record, position)
        elif action == "oom":
            self._fail(record, position)
        elif isinstance(action, str) and action in SEGMENT_ACTIONS:
            self._segment_events.append(read_segment_event(record, action, position))
        elif not isinstance(action, str) or action not in _PASSED_OVER:
            self._unknown.add(brief(action))

    def add_segments(self, segments: Any, device: int) -> None:
        """Take in the segments, and the blocks in them whose allocation was not recorded."""
        seen: set[int] = set()
        for index, record in enumerate(as_list(segments, "segments")):
            if isinstance(record, dict) and record.get("device", 0) != device:
                continue
            segment = read_segment(record, index, self._stacks)
            self._segments.append(segment)
            for block in segment.blocks:
                if block.address in seen:
                    raise TraceError(
                        f"segment {index} holds a second block at address {block.address}"
                    )
                seen.add(block.address)
                if block.is_live:
                    self._add_survivor(block, segment)

    def _allocate(self, record: dict[str, Any], position: int) -> None:
        address = number(record, "addr", "event", position)
        if address in self._live:  # its free was not recorded (skip_actions)
            self._complete_free(record, position)
        size = byte_count(record, "size", "event", position)
        self._live[address] = self._new(record, address, size, position)
        self._append(ALLOCATE, self._live[address], record, position)

    def _fail(self, record: dict[str, Any], position: int) -> None:
        # A mistyped shape may ask for more than the core counts, which no device has either.
        size = min(number(record, "size", "event", position), MOST_BYTES)
        request = self._new(record, 0, size, position)
        for op in (ALLOCATE, FREE_REQUESTED, FREE_COMPLETED):
            self._append(op, request, record, position)
        self._failed.append((request, record, position))

    def _new(self, record: dict[str, Any], address: int, size: int, position: int) -> _Allocation:
        stream = self._stream_number(number_or(0, record, "stream", "event", position))
        stack = self._stacks.number(record.get("frames"))
        allocation = _Allocation(address, size, stream, stack, pool_of(record.get("pool_id")))
        allocation.category, allocation.label = self._attribution.of_event(record, position)
        self._recorded.append(allocation)
        return allocation

    def _request_free(self, record: dict[str, Any], position: int) -> None:
        allocation = self._freed(record, position)
        if not allocation.free_requested:
            allocation.free_requested = True
            self._append(FREE_REQUESTED, allocation, record, position)

    def _complete_free(self, record: dict[str, Any], position: int) -> None:
        self._request_free(record, position)
        self._append(FREE_COMPLETED, self._live.pop(record["addr"]), record, position)

    def _freed(self, record: dict[str, Any], position: int) -> _Allocation:
        address = number(record, "addr", "event", position)
        allocation = self._live.get(address)
        if allocation is None:  # allocated before the recording began
            stream = number_or(0, record, "stream", "event", position)
            allocation = self._predating(
                address, byte_count(record, "size", "event", position), stream
            )
            allocation.pool = pool_of(record.get("pool_id"))
            allocation.category, allocation.label = self._attribution.of_event(record, position)
        return allocation

    def _predating(self, address: int, size: int, stream: int) -> _Allocation:
        allocation = _Allocation(address, size, self._stream_number(stream), stack=1)
        self._baseline.append(allocation)
        self._live[address] = allocation
        return allocation

    def _add_survivor(self, block: Block, segment: Segment) -> None:
        self._block_bytes[block.address] = block.size_bytes
        if block.address not in self._live:
            allocation = self._predating(block.address, block.requested_bytes, segment.stream)
            allocation.pool = segment.pool
            allocation.stack = block.stack or 1  # torch keeps it as long as the block lives
            allocation.category, allocation.label = self._attribution.of_block(
                block.category, block.address
            )

    def _append(
        self, op: int, allocation: _Allocation, record: dict[str, Any], position: int
    ) -> None:
        time_us = number_or(0, record, "time_us", "event", position)
        self._rows.append((op, allocation, time_us, position))

    def _stream_number(self, stream: int) -> int:
        number_ = self._streams.setdefault(stream, len(self._streams))
        if number_ >= _MAX_STREAMS:
            raise TraceError(f"the snapshot uses more than the {_MAX_STREAMS} streams accepted")
        return number_

    def finish(self, name: str, device: int, settings: dict[str, Any]) -> Snapshot:
        if not self._rows:
            raise TraceError("the snapshot holds no allocation or free; at least one is needed")
        allocations = self._baseline + self._recorded
        for number_, each in enumerate(allocations):
            each.id = number_
        failures = tuple(self._failure(*each) for each in self._failed)
        columns = self._columns(allocations)
        start_us = self._rows[0][2]
        seeds = [(ALLOCATE, seed, start_us, -1) for seed in self._baseline]
        op, of, times, events = zip(*seeds, *self._rows, strict=True)
        ids = np.array([each.id for each in of], np.uint32)
        trace = Trace(
            name=name,
            op=np.array(op, np.uint8),
            id=ids,
            size=columns.size.astype(np.uint64)[ids],
            stream=columns.stream[ids],
            time_us=_elapsed_us(times, start_us),
            device=device,
            failed=tuple(failure.id for failure in failures),
        )
        return Snapshot(
            trace=trace,
            event=np.array(events, np.int64),
            event_count=self._events,
            start_us=start_us,
            allocations=columns,
            stacks=tuple(self._stacks.stacks),
            streams=tuple(self._streams),
            segments=tuple(self._segments),
            segment_events=tuple(self._segment_events),
            failures=failures,
            settings=settings,
            unknown_actions=tuple(sorted(self._unknown)),
            categories=tuple(self._attribution.categories),
            labels=tuple(self._attribution.labels),
            outside_bytes=self._attribution.outside_bytes,
        )

    def _failure(
        self, request: _Allocation, record: dict[str, Any], position: int
    ) -> FailedRequest:
        free = record.get("device_free")
        return FailedRequest(
            id=request.id,
            event=position,
            size_bytes=record["size"],
            device_free_bytes=free if type(free) is int and free >= 0 else None,
            stream=number_or(0, record, "stream", "event", position),
            pool=request.pool or DEFAULT_POOL,
            stack=self._stacks.stacks[request.stack],
        )

    def _columns(self, allocations: list[_Allocation]) -> Allocations:
        size = np.array([each.size for each in allocations], np.uint64).astype(np.int64)
        block_bytes = rounded(size)
        for address, allocation in self._live.items():  # alive at the end: what it really takes
            known = self._block_bytes.get(address, block_bytes[allocation.id])
            block_bytes[allocation.id] = known
        pools = PoolNumbers(self._segments)
        return Allocations(
            address=np.array([each.address for each in allocations], np.uint64),
            size=size,
            block_bytes=block_bytes,
            stream=np.array([each.stream for each in allocations], np.uint8),
            stack=np.array([each.stack for each in allocations], np.int64),
            pool=np.array([pools.of(each.pool, each.address) for each in allocations], np.int64),
            pools=tuple(pools.numbers),
            category=np.array([each.category for each in allocations], np.int64),
            label=np.array([each.label for each in allocations], np.int64),
        )


def _elapsed_us(times: Sequence[int], start_us: int) -> npt.NDArray[np.uint32]:
    # The clock may step back, and 32 bits hold 71 minutes: later events share the last moment.
    elapsed_us = (np.array(times, np.float64) - start_us).clip(0, _MAX_TIME_US)
    return np.maximum.accumulate(elapsed_us).astype(np.uint32)
