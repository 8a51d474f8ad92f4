"""What an allocation took of torch's own allocator: a whole block, of which it asked for less.

Torch cuts a block off a free range only where enough of the range is left over; where it is not,
the block has all of it, and the recording has what was asked for. The ranges follow from recorded
addresses: a block begins where its range began, and what is free side by side in a segment is one
range (should_split and free_block of CUDACachingAllocator.cpp). With expandable_segments, and under
vramx, a block is what was asked for, rounded up to 512 bytes. About 2 us an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vramx.memory.segments import Region, SegmentEvent, holes_in, regions_at
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED
from vramx.sizes import MIB

if TYPE_CHECKING:
    from vramx.memory.snapshot import Snapshot

UNIT_BYTES = 512
_SMALL_BYTES = MIB  # requests up to it have segments of their own
# The least that is left over as a range of its own, in such a segment and in others.
_LEAST_SMALL_REST, _LEAST_REST = UNIT_BYTES, MIB + 1

Sizes = npt.NDArray[np.int64]


def rounded(sizes: Sizes) -> Sizes:
    """Return sizes in whole units."""
    return -(-sizes // UNIT_BYTES) * UNIT_BYTES


def exact_block_bytes(snapshot: Snapshot) -> Sizes:
    """Return what each allocation took, by its id; of requests that failed what they asked for.

    Where free ranges overlap, or that contradicts the blocks that are recorded, those of the end,
    another allocator made them: then the others have what they asked for, rounded.
    """
    blocks = snapshot.allocations.block_bytes
    if snapshot.recorded_policy != "native":
        return blocks
    try:
        found = _followed(snapshot)
    except _Overlap:
        return blocks
    at_end = snapshot.live_at(snapshot.end_event)
    return found if np.array_equal(found[at_end], blocks[at_end]) else blocks


def _followed(snapshot: Snapshot) -> Sizes:
    """Follow the events of torch's allocator."""
    begin = int(np.searchsorted(snapshot.event, 0))  # of what is no baseline
    sizes = rounded(snapshot.allocations.size)
    before = snapshot.trace.id[:begin]
    sizes[before] = snapshot.allocations.block_bytes[before]
    found = sizes.tolist()
    addresses, trace = snapshot.allocations.address.tolist(), snapshot.trace
    changes, place = snapshot.segment_events, 0
    free = _FreeRanges(snapshot.settings.get("max_split_size"))
    baseline = sorted((addresses[each], found[each]) for each in before.tolist())
    free.start(regions_at(snapshot.segments, changes, -1), baseline)
    failed = frozenset(trace.failed)
    columns = trace.op[begin:], trace.id[begin:], snapshot.event[begin:]
    for op, each, event in zip(*(column.tolist() for column in columns), strict=True):
        while place < len(changes) and changes[place].event < event:
            free.change(changes[place])
            place += 1
        if each in failed:
            continue
        if op == ALLOCATE:
            found[each] = free.take(addresses[each], found[each])
        elif op == FREE_COMPLETED:
            free.give_back(addresses[each], addresses[each] + found[each])
    return np.array(found, np.int64)


class _Overlap(Exception):  # noqa: N818 - no error: it tells that another allocator was there
    """Two free ranges have bytes in common."""


class _FreeRanges:
    """The free ranges of segments, by where they begin and by where they end."""

    def __init__(self, max_split_bytes: Any) -> None:
        is_limited = type(max_split_bytes) is int and max_split_bytes > 0
        self._max_split_bytes = max_split_bytes if is_limited else 1 << 62
        self._ends: dict[int, int] = {}  # by begin
        self._begins: dict[int, int] = {}  # by end
        self._segments: set[int] = set()  # where they begin: no range goes beyond one

    def start(self, regions: Sequence[Region], blocks: Iterable[tuple[int, int]]) -> None:
        """Begin with segments and with blocks in them, both in order of address."""
        self._segments.update(region.address for region in regions)
        for hole in holes_in(regions, blocks):
            self._put(hole.address, hole.address + hole.size_bytes)

    def change(self, change: SegmentEvent) -> None:
        """Follow a segment that is taken from the driver, or given back to it."""
        begin, end = change.address, change.address + change.size_bytes
        if change.is_growth:
            self._segments.add(begin)
            self._put(begin, end)
        elif self._ends.get(begin) == end:
            self._drop(begin, end)

    def take(self, address: int, size_bytes: int) -> int:
        """Return what the block has that was cut off for so many bytes."""
        end = self._ends.get(address)
        if end is None or end - address < size_bytes:
            return size_bytes  # not as torch's allocator does it, or not known
        self._drop(address, end)
        is_small = size_bytes <= _SMALL_BYTES
        least = _LEAST_SMALL_REST if is_small else _LEAST_REST
        is_cut = is_small or size_bytes < self._max_split_bytes
        if end - address - size_bytes < least or not is_cut:
            return end - address
        self._put(address + size_bytes, end)
        return size_bytes

    def give_back(self, begin: int, end: int) -> None:
        """Take a block back, and join it with what is free beside it in its segment."""
        before = self._begins.get(begin)
        if before is not None and begin not in self._segments:
            self._drop(before, begin)
            begin = before
        after = self._ends.get(end)
        if after is not None and end not in self._segments:
            self._drop(end, after)
            end = after
        self._put(begin, end)

    def _put(self, begin: int, end: int) -> None:
        self._ends[begin], self._begins[end] = end, begin

    def _drop(self, begin: int, end: int) -> None:
        if self._ends.pop(begin, None) != end or self._begins.pop(end, None) != begin:
            raise _Overlap
