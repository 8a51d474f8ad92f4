"""What the allocator promises to streams: whose memory is taken, and who waits for whom.

Here the waits are counted. That they suffice is checked in tests/native/units/stream_order.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from simulated import (
    CAPACITY,
    MIB,
    PIECE,
    UNIT,
    device,
    fill_up,
    freed_by_another,
    held,
    open_device,
)

if TYPE_CHECKING:
    from vramx._core import SimulatedDevice

__all__ = ["device"]


@pytest.mark.parametrize(
    ("mode", "size", "taker", "is_taken", "waits"),
    [
        pytest.param("under_pressure", CAPACITY, 7, True, 0, id="its own without a wait"),
        pytest.param("under_pressure", PIECE, 8, False, 0, id="fresh memory while there is room"),
        pytest.param("under_pressure", CAPACITY, 8, True, 1, id="another's rather than none"),
        pytest.param("always", PIECE, 8, True, 1, id="always: another's before it grows"),
        pytest.param("never", PIECE, 8, False, 0, id="never: fresh memory"),
    ],
)
def test_a_stream_takes(mode: str, size: int, taker: int, is_taken: bool, waits: int) -> None:
    device = open_device(cross_stream=mode)
    freed = freed_by_another(device, size)
    assert (device.allocate(size, taker) == freed) == is_taken
    assert held(device) == (size if is_taken else 2 * size)
    assert device.waits() == device.stats()["num_cross_stream"] == waits


def test_memory_that_another_stream_is_done_with_is_taken_without_a_wait(
    device: SimulatedDevice,
) -> None:
    pieces = fill_up(device, stream=7)
    for piece in pieces:
        device.free(piece)
    device.allocate(2 * PIECE, 8)
    assert held(device) == CAPACITY
    assert device.waits() == 0


def test_a_stream_prefers_its_own_memory_to_a_better_fit(device: SimulatedDevice) -> None:
    foreign, own = device.allocate(MIB, 7), device.allocate(3 * MIB, 8)
    device.free(foreign)
    device.free(own)
    assert own <= device.allocate(MIB, 8) < own + 3 * MIB
    assert device.waits() == 0


def test_a_stream_that_asks_alone_has_its_memory_in_one_piece() -> None:
    device = open_device(256 * MIB, has_bytes=False)
    device.free(device.allocate(MIB, 8))

    def free_extents() -> int:
        blocks = [device.allocate(MIB, 7) for _ in range(200)]
        device.submit(7)
        for block in blocks:
            device.free(block)
        return sum(span["state"] == "free" and span["size"] > PIECE / 2 for span in device.layout())

    assert free_extents() == 2  # newer apart from older, for the other stream
    for _ in range(1 << 14):
        device.free(device.allocate(UNIT, 7))
    assert free_extents() == 1


def test_a_second_theft_needs_no_wait_until_the_stream_frees_again(device: SimulatedDevice) -> None:
    blocks = fill_up(device, 7)
    device.submit(7)
    for block in blocks:
        device.free(block)
    for _ in range(4):
        device.allocate(MIB, 8)
    assert device.waits() == 1


def test_never_takes_its_memory_back_once_the_recorded_stream_is_done() -> None:
    device = open_device(cross_stream="never")
    for _ in range(5):
        address = device.allocate(PIECE, 7)
        device.record_stream(address, 8)
        device.free(address)
    assert held(device) == PIECE


def test_an_unknown_mode_is_refused_with_those_that_are_accepted() -> None:
    with pytest.raises(ValueError, match=r"'x' is unknown; accepted are never, under_pressure"):
        open_device(cross_stream="x")


@pytest.mark.parametrize(("recorded", "waits"), [([8], 1), ([8, 8], 1), ([7], 0)])
def test_a_block_waits_once_for_each_other_stream_that_was_recorded(
    device: SimulatedDevice, recorded: list[int], waits: int
) -> None:
    block = device.allocate(CAPACITY, 7)
    for stream in recorded:
        device.record_stream(block, stream)
    for stream in (7, 8):
        device.submit(stream)
    device.free(block)
    device.allocate(CAPACITY, 7)
    assert device.waits() == waits


def test_a_stream_is_recorded_on_live_blocks_only(device: SimulatedDevice) -> None:
    with pytest.raises(ValueError, match="not a live block"):
        device.record_stream(4096, 7)


def test_a_buffer_that_was_handed_over_is_had_again_when_its_own_reader_is_done(
    device: SimulatedDevice,
) -> None:
    """Batches are copied on a stream beside the main one, which reads them; one is under way."""
    for _ in range(8):
        batch = device.allocate(PIECE, 7)
        device.advance_all()  # what was queued before
        device.submit(7)
        device.record_stream(batch, 0)
        device.submit(0)
        device.free(batch)
    assert held(device) == 2 * PIECE
    assert device.waits() == 0


def test_a_free_takes_no_large_buffer_of_another_streams_with_it() -> None:
    device, large = open_device(512 * MIB, has_bytes=False), 64 * MIB
    first, second = (device.allocate(large, 7) for _ in range(2))
    device.free(first)
    device.allocate(UNIT, 8)  # asks the streams: the first is over
    device.submit(7)
    device.free(second)
    assert device.allocate(large, 8) == first
    assert device.waits() == 0
