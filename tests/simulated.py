"""The simulated device as the allocator's tests use it: 32 MiB, real bytes, ways to fill it.

Its chunks are multiples of 2 MiB unless a test asks for another granularity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vramx._core import SimulatedDevice

core = pytest.importorskip("vramx._core", reason="the compiled core is not built")

KIB, MIB = 1 << 10, 1 << 20
UNIT = 512
CAPACITY = 32 * MIB
PIECE = 8 * MIB


def open_device(capacity_bytes: int = CAPACITY, **options: Any) -> SimulatedDevice:
    return core.SimulatedDevice(capacity_bytes, **options)


@pytest.fixture
def device() -> SimulatedDevice:
    return open_device()


def held(device: SimulatedDevice) -> int:
    return int(device.stats()["reserved_bytes"]["current"])


def live(device: SimulatedDevice) -> int:
    return int(device.stats()["allocated_bytes"]["all"]["current"])


def fill_up(device: SimulatedDevice, stream: int = 0) -> list[int]:
    """Take the whole device in pieces of 8 MiB, in address order."""
    return [device.allocate(PIECE, stream) for _ in range(CAPACITY // PIECE)]


def freed_by_another(device: SimulatedDevice, size: int, stream: int = 7) -> int:
    """Return where a stream has freed a block while it still had work queued."""
    block = device.allocate(size, stream)
    device.submit(stream)
    device.free(block)
    return block


def take_stitched(device: SimulatedDevice) -> tuple[int, list[int]]:
    """Return a block on the first and third piece of a full device, and those pieces' addresses."""
    pieces = fill_up(device)
    device.free(pieces[0])
    device.free(pieces[2])
    return device.allocate(2 * PIECE), [pieces[0], pieces[2]]
