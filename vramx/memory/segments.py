"""The memory that torch's allocator holds from the driver, and the holes in it at any event.

A snapshot has the segments of its end alone. Those of an earlier event follow by undoing the events
that came after it, last one first. Numbers of stacks are those of Snapshot.stacks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PoolId = tuple[int, ...]
DEFAULT_POOL: PoolId = (0, 0)
SMALL_SEGMENT_BYTES = 2 << 20  # of torch's allocator


class Block(NamedTuple):
    """A piece of a segment at the time of the snapshot."""

    address: int
    size_bytes: int
    requested_bytes: int
    is_live: bool  # in use, or freed and waited for by a stream
    stack: int
    category: str = ""  # as the file names it


@dataclass(frozen=True)
class Segment:
    """A piece of memory held from the driver at the time of the snapshot."""

    address: int
    size_bytes: int
    stream: int
    pool: PoolId
    is_small: bool  # for requests up to 1 MiB, and for no others; those have the rest
    is_expandable: bool
    blocks: tuple[Block, ...]


class SegmentEvent(NamedTuple):
    """Memory taken from the driver or given back; `event` counts in the recording."""

    event: int
    is_growth: bool
    is_mapping: bool  # page by page, into a range that may go on at its ends
    address: int
    size_bytes: int
    stream: int
    pool: PoolId


class Hole(NamedTuple):
    """Free memory that one request could get: in one segment, of one stream, pool and class."""

    address: int
    size_bytes: int
    stream: int
    pool: PoolId
    is_small: bool


class Region(NamedTuple):
    """Contiguous memory held from the driver."""

    address: int
    end: int
    stream: int
    pool: PoolId
    is_small: bool


def regions_at(
    segments: Iterable[Segment], events: Sequence[SegmentEvent], event: int
) -> list[Region]:
    """Return what was held after an event, in order of address."""
    regions = sorted(
        Region(each.address, each.address + each.size_bytes, each.stream, each.pool, each.is_small)
        for each in segments
    )
    for change in reversed(events):
        if change.event <= event:
            break
        (_take_out if change.is_growth else _put_back)(regions, change)
    return regions


def _take_out(regions: list[Region], change: SegmentEvent) -> None:
    begin, end = change.address, change.address + change.size_bytes
    index = bisect.bisect_right(regions, begin, key=lambda region: region.address) - 1
    if index < 0 or regions[index].end < end:
        return  # the recording contradicts itself; what is not there cannot be taken away
    region = regions[index]
    parts = [region._replace(end=begin), region._replace(address=end)]
    regions[index : index + 1] = [part for part in parts if part.address < part.end]


def _put_back(regions: list[Region], change: SegmentEvent) -> None:
    begin, end = change.address, change.address + change.size_bytes
    # An event does not name the class; but only that of small requests has segments of this size.
    is_small = change.size_bytes <= SMALL_SEGMENT_BYTES
    region = Region(begin, end, change.stream, change.pool, is_small)
    index = bisect.bisect_right(regions, region.address, key=lambda each: each.address)
    first = last = index
    if change.is_mapping:  # pages beside each other are one hole; segments never are
        if index and _joins(regions[index - 1], region):
            first, region = index - 1, region._replace(address=regions[index - 1].address)
        if index < len(regions) and _joins(region, regions[index]):
            last, region = index + 1, region._replace(end=regions[index].end)
    regions[first:last] = [region]


def _joins(left: Region, right: Region) -> bool:
    return left.end == right.address and (left.stream, left.pool) == (right.stream, right.pool)


def holes_in(regions: Sequence[Region], blocks: Iterable[tuple[int, int]]) -> list[Hole]:
    """Return what is free in the regions.

    Args:
        regions: in order of address.
        blocks: address and size of each live block, in order of address.
    """
    holes = []
    remaining = iter(blocks)
    block = next(remaining, None)
    for region in regions:
        position = region.address
        while block is not None and block[0] < region.end:
            if block[0] > position:
                holes.append(Hole(position, block[0] - position, *region[2:]))
            position = max(position, block[0] + block[1])
            block = next(remaining, None)
        if position < region.end:
            holes.append(Hole(position, region.end - position, *region[2:]))
    return holes


class PoolNumbers:
    """Numbers pools in order of appearance, and finds that of an address."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.numbers: dict[PoolId, int] = {DEFAULT_POOL: 0}
        self._segments = sorted(segments, key=lambda segment: segment.address)
        self._addresses = [segment.address for segment in self._segments]

    def of(self, pool: PoolId | None, address: int) -> int:
        """Return the number of a pool, or of that in whose segment the address lies."""
        if pool is None:
            index = bisect.bisect_right(self._addresses, address) - 1
            segment = self._segments[index] if index >= 0 else None
            is_inside = segment is not None and address < segment.address + segment.size_bytes
            pool = segment.pool if segment is not None and is_inside else DEFAULT_POOL
        return self.numbers.setdefault(pool, len(self.numbers))
