"""What the allocator promises where memory ends: the error, limits, and relief by callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from simulated import CAPACITY, MIB, PIECE, UNIT, device, held, live, open_device

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
    assert "The device has 32.00 MiB, of which 8.00 MiB is free" in str(e.value)
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
