"""What the allocator promises its callers: blocks, stitching, giving memory back.

On the simulated device, with real bytes and no GPU. Streams, limits and reports have
files of their own beside this one; the parts of the core have their checks in tests/native/units.
That no block disturbs another, wherever it lies, is what the random programs of tests/native/stress
show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from samples import SMALL
from simulated import (
    CAPACITY,
    KIB,
    MIB,
    PIECE,
    UNIT,
    device,
    fill_up,
    held,
    live,
    open_device,
    take_stitched,
)

from vramx import _core
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, load_trace

if TYPE_CHECKING:
    from vramx._core import SimulatedDevice

__all__ = ["device"]


# --- blocks ---------------------------------------------------------------------------------------


def test_a_request_of_none_is_one_of_a_single_unit(device: SimulatedDevice) -> None:
    assert device.allocate(0) != device.allocate(0)
    assert live(device) == 2 * UNIT


def test_what_is_no_live_block_is_not_freed(device: SimulatedDevice) -> None:
    block = device.allocate(MIB)
    with pytest.raises(ValueError, match="not a live block"):
        device.free(block + UNIT)
    device.free(block)
    with pytest.raises(ValueError, match="not a live block"):
        device.free(block)


def test_owned_are_the_addresses_of_blocks_and_of_aliases(device: SimulatedDevice) -> None:
    stitched, pieces = take_stitched(device)
    assert device.owns(stitched)
    assert device.owns(pieces[0])
    assert not device.owns(4096)


def test_freed_memory_serves_the_next_block_without_a_driver_call(device: SimulatedDevice) -> None:
    device.free(device.allocate(PIECE))
    calls = device.driver_calls()
    device.allocate(PIECE)
    assert device.driver_calls() == calls


def test_the_smallest_extent_that_fits_is_taken(device: SimulatedDevice) -> None:
    large = device.allocate(4 * MIB)
    device.allocate(MIB)
    small = device.allocate(2 * MIB)
    device.allocate(MIB)
    device.free(large)
    device.free(small)
    assert device.allocate(2 * MIB) == small


def open_with_two_extents() -> tuple[SimulatedDevice, range, range]:
    """Return a device with free extents of 8 and of 24 MiB, and where they are."""
    device = open_device(2 * CAPACITY)
    small, _, large, _ = [device.allocate(size) for size in (8 * MIB, 2 * MIB, 24 * MIB, 2 * MIB)]
    device.free(small)
    device.free(large)
    return device, range(small, small + 8 * MIB), range(large, large + 24 * MIB)


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        pytest.param([MIB, MIB], [0, MIB], id="loosely: side by side in the largest"),
        pytest.param([2 * MIB], [None], id="well, in less than five times its size: there"),
        pytest.param([MIB, 3 * MIB // 2, 2 * MIB], [0, MIB, None], id="loosely: beside its kin"),
    ],
)
def test_a_large_block_goes_where_an_extent_fits_it(
    sizes: list[int], places: list[int | None]
) -> None:
    device, best, largest = open_with_two_extents()
    for size, place in zip(sizes, places, strict=True):
        assert device.allocate(size) in (best if place is None else [largest.start + place])


def test_a_large_block_whose_like_was_brief_takes_the_best_fit() -> None:
    device, best, _ = open_with_two_extents()
    for _ in range(3):  # the third comes after two of its size, as the fourth does
        device.free(device.allocate(MIB))
    assert device.allocate(MIB) in best


def test_memory_grows_by_what_is_lacking_alone(device: SimulatedDevice) -> None:
    device.allocate(3 * MIB)
    assert held(device) == 4 * MIB
    device.allocate(3 * MIB)
    assert held(device) == 6 * MIB


# --- stitching ------------------------------------------------------------------------------------


def test_free_pieces_that_do_not_touch_serve_one_block(device: SimulatedDevice) -> None:
    take_stitched(device)
    assert held(device) == CAPACITY
    assert live(device) == CAPACITY
    assert device.stats()["num_stitches"] == 1
    assert device.check() == ""


def test_an_alias_shows_the_bytes_of_its_chunks(device: SimulatedDevice) -> None:
    stitched, pieces = take_stitched(device)
    device.fill(stitched, PIECE, 1)
    device.fill(stitched + PIECE, PIECE, 2)
    device.free(stitched)
    assert sorted(device.allocate(PIECE) for _ in pieces) == sorted(pieces)
    assert [device.count_mismatches(piece, PIECE, 1) for piece in pieces].count(0) == 1
    assert [device.count_mismatches(piece, PIECE, 2) for piece in pieces].count(0) == 1


def test_a_freed_alias_serves_its_like_without_a_driver_call_and_its_pieces_single_blocks(
    device: SimulatedDevice,
) -> None:
    stitched, pieces = take_stitched(device)
    device.free(stitched)
    calls = device.driver_calls()
    assert device.allocate(2 * PIECE) == stitched
    assert device.driver_calls() == calls
    assert device.stats()["num_alias_hits"] == 1
    device.free(stitched)
    assert device.allocate(PIECE) in pieces


@pytest.mark.parametrize(("hole_bytes", "stitches"), [(2 * MIB, 1), (MIB, 0)])
def test_growth_is_mapped_twice_only_where_that_spares_some(hole_bytes: int, stitches: int) -> None:
    device = open_device(1024 * MIB)
    hole, _ = device.allocate(hole_bytes), device.allocate(4 * MIB - hole_bytes)
    device.free(hole)
    device.allocate(512 * MIB)
    assert device.stats()["num_stitches"] == stitches


def test_a_periodic_program_settles_within_three_steps() -> None:
    device = open_device(256 * MIB)
    sizes = random.Random(1).choices([3 * KIB, 700 * KIB, 3 * MIB, 9 * MIB, 17 * MIB], k=40)
    steps = [calls_of(device, lambda: run_step(device, sizes)) for _ in range(6)]
    assert steps[0] > 0
    assert steps[3:] == [0, 0, 0]


@pytest.mark.parametrize("seed", [46, 4, 28])
def test_a_program_of_few_requests_settles_wherever_others_left_gaps(seed: int) -> None:
    device = _core.SimulatedDevice(80 * 1024 * MIB, 2 * MIB, False)
    leave_gaps(device, random.Random(seed))

    def step() -> None:
        kept = [device.allocate((1 + index * 7 % 13) * 3 * MIB) for index in range(40)]
        for block in kept[::3]:
            device.free(block)
        del kept[::3]
        for block in [*kept, device.allocate(200 * MIB)]:
            device.free(block)

    steps = [calls_of(device, step) for _ in range(80)]
    # A short period is believed after two thousand requests, which are 49 of these steps.
    assert steps[52:] == [0] * 28


def test_a_recorded_program_of_seven_streams_settles_when_it_repeats_itself(traces: Path) -> None:
    """In whole rounds, after which all is freed; the first ones grow, and put blocks together."""
    trace = load_trace(traces / SMALL)
    columns = (trace.op, trace.id, trace.size, trace.stream)
    events = list(zip(*(column.tolist() for column in columns), strict=True))
    device = open_device(64 << 30, has_bytes=False)
    calls = []
    for _ in range(7):
        before, addresses = device.driver_calls(), {}
        for op, block, size, stream in events:
            if op == ALLOCATE:
                addresses[block] = device.allocate(size, stream)
            elif op == FREE_COMPLETED and block in addresses:
                device.free(addresses.pop(block))
        for address in addresses.values():
            device.free(address)
        calls.append(device.driver_calls() - before)
    assert calls[0] > 0
    assert calls[4:] == [0, 0, 0]


def calls_of(device: SimulatedDevice, step: Callable[[], None]) -> int:
    """Return how many driver calls a step makes."""
    calls = device.driver_calls()
    step()
    return device.driver_calls() - calls


def leave_gaps(device: SimulatedDevice, order: random.Random) -> None:
    """Leave what programs of several streams left: free memory of all sizes between blocks."""
    sizes = [512, 4 * KIB, 70_000, 300_000, MIB, 3 * MIB, 8 * MIB, 33 * MIB, 100 * MIB]
    live: list[int] = []
    for _ in range(order.randrange(1, 8)):
        for _ in range(order.randrange(20, 200)):
            stream = order.choice([0, 0, 0, 11, 12, 13])
            size = order.choice([*sizes, order.randrange(1, 64 * MIB)])
            live.append(device.allocate(size, stream))
            if order.random() < 0.1:
                device.record_stream(live[-1], order.choice([11, 12, 13]))
        order.shuffle(live)
        kept = order.randrange(0, 101)
        for block in live[kept:]:
            device.free(block)
        del live[kept:]
        if order.random() < 0.5:
            device.advance_all()


def run_step(device: SimulatedDevice, sizes: list[int]) -> None:
    """Take and free blocks in an order that leaves holes: at most 8 live at once."""
    blocks: list[int] = []
    for turn, size in enumerate(sizes):
        blocks.append(device.allocate(size))
        if len(blocks) > 8:
            device.free(blocks.pop(turn * 5 % 8))
    for block in blocks:
        device.free(block)


# --- giving memory back ---------------------------------------------------------------------------


def test_trim_gives_whole_free_chunks_back(device: SimulatedDevice) -> None:
    pieces = fill_up(device)
    device.free(pieces[1])
    report = device.trim()
    assert report["released_bytes"] == PIECE
    assert held(device) == CAPACITY - PIECE
    assert device.check() == ""


def test_trim_keeps_a_chunk_with_a_live_byte(device: SimulatedDevice) -> None:
    block = device.allocate(MIB)
    device.allocate(MIB)
    device.free(block)
    assert device.trim()["released_bytes"] == 0
    assert held(device) == 2 * MIB


def test_trim_waits_for_the_streams_that_freed(device: SimulatedDevice) -> None:
    block = device.allocate(PIECE, 3)
    device.submit(3)
    device.free(block)
    assert device.trim()["released_bytes"] == PIECE
    assert device.stats()["num_sync_all_streams"] == 1


def test_an_alias_in_use_is_left(device: SimulatedDevice) -> None:
    stitched, _ = take_stitched(device)
    device.fill(stitched, 2 * PIECE, 4)
    assert device.trim()["released_bytes"] == 0
    assert device.defragment()["aliases_collected"] == 0
    assert device.stats()["alias_count"] == 1
    assert device.count_mismatches(stitched, 2 * PIECE, 4) == 0


def test_defragment_collects_idle_aliases(device: SimulatedDevice) -> None:
    stitched, pieces = take_stitched(device)
    device.free(stitched)
    for piece in pieces:
        assert device.allocate(PIECE) in pieces, piece
    report = device.defragment()
    assert (report["aliases_collected"], report["alias_address_bytes"]) == (1, 2 * PIECE)
    assert report["released_bytes"] == 0
    assert device.stats()["alias_count"] == 0
