"""Reads what a torch memory snapshot says of segments: those at the end, and how they came."""

from __future__ import annotations

from typing import Any

from vramx.memory.segments import DEFAULT_POOL, Block, Segment, SegmentEvent
from vramx.memory.snapshot_file import as_list, byte_count, field, number, number_or
from vramx.memory.stacks import StackTable

# Action -> whether memory is taken from the driver, and whether it is mapped page by page.
SEGMENT_ACTIONS = {
    "segment_alloc": (True, False),
    "segment_free": (False, False),
    "segment_map": (True, True),
    "segment_unmap": (False, True),
}
_LIVE_STATES = ("active_allocated", "active_pending_free")


def read_segment(record: Any, index: int, stacks: StackTable) -> Segment:
    """Return one entry of `segments`, its blocks in order of address."""
    stream = number(record, "stream", "segment", index)
    start = address = number(record, "address", "segment", index)
    blocks = []
    for each in as_list(field(record, "blocks", "segment", index), f"blocks of segment {index}"):
        size = byte_count(each, "size", "a block of segment", index)
        # Older snapshots leave an address to follow from the sizes before it.
        address = number_or(address, each, "address", "a block of segment", index)
        requested = size
        if "requested_size" in each:
            requested = byte_count(each, "requested_size", "a block of segment", index)
        is_live = each.get("state") in _LIVE_STATES
        stack = stacks.number(each.get("frames")) if is_live else 0
        category = each.get("category", "")
        category = category if isinstance(category, str) else ""
        blocks.append(Block(address, size, requested, is_live, stack, category))
        address += size
    held = sum(block.size_bytes for block in blocks)
    return Segment(
        address=start,
        size_bytes=(
            byte_count(record, "total_size", "segment", index) if "total_size" in record else held
        ),
        stream=stream,
        pool=pool_of(record.get("segment_pool_id")) or DEFAULT_POOL,
        is_small=record.get("segment_type") == "small",
        is_expandable=bool(record.get("is_expandable")),
        blocks=tuple(blocks),
    )


def read_segment_event(record: dict[str, Any], action: str, position: int) -> SegmentEvent:
    """Return an event in which memory was taken from the driver or given back."""
    is_growth, is_mapping = SEGMENT_ACTIONS[action]
    return SegmentEvent(
        event=position,
        is_growth=is_growth,
        is_mapping=is_mapping,
        address=number(record, "addr", "event", position),
        size_bytes=byte_count(record, "size", "event", position),
        stream=number_or(0, record, "stream", "event", position),
        pool=pool_of(record.get("pool_id")) or DEFAULT_POOL,
    )


def pool_of(value: Any) -> tuple[int, ...] | None:
    """Return the id of a memory pool, or None where the snapshot names none (before torch 2.12)."""
    if isinstance(value, (list, tuple)) and all(type(part) is int for part in value):
        return tuple(value)
    return None
