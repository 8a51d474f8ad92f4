"""What the allocator says of itself: statistics, layout, events."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from simulated import CAPACITY, MIB, PIECE, UNIT, device, held, live, open_device, take_stitched

if TYPE_CHECKING:
    from vramx._core import SimulatedDevice

__all__ = ["device"]


def test_statistics_count_requests_and_what_they_take(device: SimulatedDevice) -> None:
    device.allocate(1000)
    device.allocate(MIB + 1)
    stats = device.stats()
    assert stats["requested_bytes"]["small_pool"]["current"] == 1000
    assert stats["allocated_bytes"]["small_pool"]["current"] == 1024
    assert stats["requested_bytes"]["large_pool"]["current"] == MIB + 1
    assert stats["allocated_bytes"]["all"]["current"] == 1024 + MIB + UNIT


def test_free_bytes_are_what_is_held_and_not_live_and_their_peak_stays(
    device: SimulatedDevice,
) -> None:
    device.allocate(UNIT)
    before = device.stats()["inactive_split_bytes"]
    assert before["current"] == before["peak"] == held(device) - UNIT > 0
    device.allocate(held(device) - UNIT)
    assert device.stats()["inactive_split_bytes"] == {**before, "current": 0}


def test_reset_peaks_start_from_what_is_there(device: SimulatedDevice) -> None:
    device.free(device.allocate(PIECE))
    device.allocate(MIB)
    device.reset_peak_stats()
    assert device.stats()["allocated_bytes"]["all"]["peak"] == MIB


def test_reset_sums_start_from_nothing(device: SimulatedDevice) -> None:
    device.allocate(MIB)
    with pytest.raises(MemoryError):
        device.allocate(2 * CAPACITY)
    device.reset_accumulated_stats()
    stats = device.stats()
    assert stats["allocation"]["all"] == {"current": 1, "peak": 1, "allocated": 0, "freed": 0}
    counts = ("num_device_alloc", "num_ooms", "num_alloc_retries")
    assert [stats[name] for name in counts] == [0, 0, 0]


def test_the_layout_tiles_the_arena_and_names_the_blocks(device: SimulatedDevice) -> None:
    stitched, pieces = take_stitched(device)
    spans = device.layout()
    assert all(a["address"] + a["size"] == b["address"] for a, b in pairwise(spans))
    assert [s["address"] for s in spans if s["block"] == stitched] == pieces
    assert sum(s["size"] for s in spans if s["state"] == "used") == live(device)


@pytest.mark.parametrize("ring", [2, 0])
def test_events_are_kept_oldest_first_up_to_the_ring(ring: int) -> None:
    device = open_device(trace_events=ring)
    block = device.allocate(MIB, 3)
    device.record_stream(block, 4)
    device.free(block)
    kept = [("record_stream", block, MIB, 4), ("free", block, MIB, 3)]
    assert device.events() == kept[:ring]
