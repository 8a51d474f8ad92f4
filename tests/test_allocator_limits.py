"""What the allocator promises where memory ends, and what it says of itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from simulated import (
    CAPACITY,
    KIB,
    MIB,
    PIECE,
    UNIT,
    device,
    held,
    live,
    open_device,
    take_stitched,
)

if TYPE_CHECKING:
    from vramx._core import SimulatedDevice

__all__ = ["device"]


def test_out_of_memory_says_what_was_asked_and_what_is_there_and_changes_nothing(
    device: SimulatedDevice,
) -> None:
    device.allocate(24 * MIB)
    asked = r"^CUDA out of memory\. Tried to allocate 16\.00 MiB\."
    with pytest.raises(MemoryError, match=asked) as e:
        device.allocate(16 * MIB)
    assert "holds 24.00 MiB: 24.00 MiB live and 0 bytes free" in str(e.value)
    assert "The device has a total capacity of 32.00 MiB of which 8.00 MiB is free" in str(e.value)
    assert (held(device), live(device), device.check()) == (24 * MIB, 24 * MIB, "")
    assert device.stats()["num_ooms"] == 1
    device.allocate(8 * MIB)


def test_a_size_beyond_any_device_is_out_of_memory(device: SimulatedDevice) -> None:
    with pytest.raises(MemoryError):
        device.allocate((1 << 64) - 1)
    assert device.check() == ""


def test_the_limit_is_exact_and_a_higher_one_lets_it_grow_again() -> None:
    device = open_device(limit_bytes=PIECE)
    device.allocate(PIECE)
    with pytest.raises(MemoryError, match=r"limit is 8\.00 MiB"):
        device.allocate(UNIT)
    device.set_limit(2 * PIECE)
    device.allocate(PIECE)
    assert held(device) == 2 * PIECE


def test_a_lower_limit_stops_growth_and_takes_nothing_away(device: SimulatedDevice) -> None:
    device.free(device.allocate(2 * PIECE))
    device.set_limit(PIECE)
    device.allocate(2 * PIECE)
    with pytest.raises(MemoryError):
        device.allocate(PIECE)


def test_relief_is_asked_for_before_memory_runs_out(device: SimulatedDevice) -> None:
    kept = [device.allocate(24 * MIB)]

    def drop_it() -> bool:
        device.free(kept.pop())
        return True

    device.add_relief(drop_it)
    device.allocate(16 * MIB)
    assert kept == []
    assert device.stats()["num_alloc_retries"] == 1
    assert device.stats()["num_ooms"] == 0


def test_relief_is_not_asked_for_while_memory_lasts(device: SimulatedDevice) -> None:
    asked = []
    device.add_relief(lambda: bool(asked.append(1)))
    device.allocate(CAPACITY)
    assert asked == []
    with pytest.raises(MemoryError):
        device.allocate(UNIT)
    assert asked == [1]


def test_a_growth_that_fails_once_is_tried_again() -> None:
    for nth in range(1, 4):  # create, map, set_access
        device = open_device(4 * MIB, granularity_bytes=16 * KIB)
        device.fail_nth_call(nth)
        device.fill(device.allocate(MIB), MIB, nth)
        assert device.check() == ""


# --- statistics, layout, events -------------------------------------------------------------------


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
    from_before = device.allocate(MIB)
    with pytest.raises(MemoryError):
        device.allocate(2 * CAPACITY)
    device.reset_accumulated_stats()
    stats = device.stats()
    assert stats["allocation"]["all"] == {"current": 1, "peak": 1, "allocated": 0, "freed": 0}
    device.free(from_before)
    device.allocate(2 * MIB)
    counts_of_sizes = device.stats()["allocation"]
    assert counts_of_sizes["small_pool"] == {"current": 0, "peak": 1, "allocated": 0, "freed": 1}
    assert counts_of_sizes["large_pool"] == {"current": 1, "peak": 1, "allocated": 1, "freed": 0}
    assert counts_of_sizes["all"] == {"current": 1, "peak": 1, "allocated": 1, "freed": 1}
    counts = ("num_device_alloc", "num_ooms", "num_alloc_retries")
    assert [stats[name] for name in counts] == [0, 0, 0]


def test_the_layout_tiles_the_arena_and_names_the_blocks(device: SimulatedDevice) -> None:
    stitched, pieces = take_stitched(device)
    spans = device.layout()
    assert all(a["address"] + a["size"] == b["address"] for a, b in pairwise(spans))
    assert [s["address"] for s in spans if s["block"] == stitched] == pieces
    assert sum(s["size"] for s in spans if s["state"] == "used") == live(device)
    # Between the zones of small and large chunks lies one granule that is never mapped.
    assert Counter(s["state"] for s in spans)["border"] == 1
    assert {s["state"] for s in spans} <= {"used", "free", "unmapped", "border"}


@pytest.mark.parametrize("ring", [2, 0])
def test_events_are_kept_oldest_first_up_to_the_ring(ring: int) -> None:
    device = open_device(trace_events=ring)
    block = device.allocate(MIB, 3)
    device.record_stream(block, 4)
    device.free(block)
    kept = [("record_stream", block, MIB, 4), ("free", block, MIB, 3)]
    assert device.events() == kept[:ring]
