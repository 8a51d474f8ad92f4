"""The device allocators of a process, as Python sees them.

Their behaviour in detail, forks and threads included, is in tests/native/process.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from child_processes import python

if TYPE_CHECKING:
    from vramx._core import Devices

core = pytest.importorskip("vramx._core", reason="the compiled core is not built")

KIB, MIB = 1 << 10, 1 << 20
CAPACITY = 64 * MIB
NO_LIMIT = 2**64 - 1
OK, OUT_OF_MEMORY, NOT_OURS, UNAVAILABLE, FORKED = range(5)


class Process:
    """Devices, called as the shim calls them; keeps them alive."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices

    def try_allocate(self, device: int, size_bytes: int, stream: int = 0) -> tuple[int, int]:
        return self.devices.allocate(device, size_bytes, stream)

    def allocate(self, device: int, size_bytes: int, stream: int = 0) -> int:
        code, address = self.try_allocate(device, size_bytes, stream)
        assert code == OK
        return address

    def free(self, address: int) -> int:
        return self.devices.free(address)


def open_process(count: int = 2, capacity_bytes: int = CAPACITY, **options: Any) -> Process:
    return Process(core.open_simulated(count, capacity_bytes, **options))


@pytest.fixture
def process() -> Iterator[Process]:
    opened = open_process()
    yield opened
    assert opened.devices.check() == ""


# --- blocks ---------------------------------------------------------------------------------------


def test_a_block_is_memory_of_its_own(process) -> None:
    first, second = process.allocate(0, MIB), process.allocate(1, MIB)
    ctypes.memset(first, 1, MIB)
    ctypes.memset(second, 2, MIB)
    assert ctypes.string_at(first, MIB) == b"\1" * MIB
    assert ctypes.string_at(second, MIB) == b"\2" * MIB


def test_a_higher_limit_is_suggested_where_there_is_one(process) -> None:
    process.try_allocate(0, 2 * CAPACITY)
    assert "higher limit" not in process.devices.out_of_memory_text()
    process.devices.set_limit(0, 8 * MIB)
    process.try_allocate(0, 16 * MIB)
    assert "set a higher limit" in process.devices.out_of_memory_text()


def test_a_device_that_is_not_there_is_unavailable(process) -> None:
    assert process.try_allocate(2, MIB) == (UNAVAILABLE, 0)
    assert process.devices.failure_text().endswith("there are 2 simulated devices")


# --- what Python sees -----------------------------------------------------------------------------


def test_devices_are_started_by_their_first_allocation(process) -> None:
    assert process.devices.started() == []
    process.allocate(1, MIB)
    assert process.devices.started() == [1]
    assert process.devices.driver_calls(0) == dict.fromkeys(process.devices.driver_calls(0), 0)
    assert process.devices.driver_calls(1)["create"] > 0
    assert process.devices.driver_calls()["total_us"] > 0


def test_figures_are_of_one_device_or_of_all(process) -> None:
    process.allocate(0, 2 * MIB)
    process.allocate(1, 4 * MIB)
    devices = process.devices
    assert [devices.allocated(0), devices.allocated(1)] == [2 * MIB, 4 * MIB]
    assert devices.allocated() == 6 * MIB
    assert devices.held(1) == devices.stats(1)["reserved_bytes"]["current"]
    assert devices.held() == devices.held(0) + devices.held(1)


def test_freed_memory_goes_back_on_demand(process) -> None:
    kept, freed = process.allocate(0, 4 * MIB), process.allocate(1, 8 * MIB)
    assert process.free(freed) == OK
    process.devices.trim(0)
    assert process.devices.held(1) == 8 * MIB
    assert process.devices.defragment()["released_bytes"] == 8 * MIB
    assert process.devices.held() == 4 * MIB
    assert process.free(kept) == OK


def test_an_allocation_waits_for_what_another_thread_is_giving_back(process) -> None:
    stop = threading.Event()
    trims = []

    def give_back() -> None:
        while not stop.is_set():
            process.devices.trim(0)
            trims.append(1)

    thread = threading.Thread(target=give_back)
    thread.start()
    try:
        for _ in range(500):
            process.free(process.allocate(0, CAPACITY * 3 // 4))
    finally:
        stop.set()
        thread.join()
    assert trims
    assert process.devices.check(0) == ""


def test_the_opening_limit_is_every_devices() -> None:
    process = open_process(limit_bytes=4 * MIB)
    assert process.try_allocate(0, 6 * MIB)[0] == OUT_OF_MEMORY
    assert process.try_allocate(1, 4 * MIB)[0] == OK


def test_layout_and_events_are_of_a_started_device() -> None:
    process = open_process(trace_events=8)
    block = process.allocate(0, 1000)
    assert ("allocate", block, 1000, 0) in process.devices.events(0)
    assert any(span["block"] == block for span in process.devices.layout(0))
    with pytest.raises(ValueError, match="device 1 was not started"):
        process.devices.layout(1)


def test_made_up_addresses_of_two_devices_do_not_meet() -> None:
    process = open_process(has_bytes=False, capacity_bytes=80 << 30)
    first, second = process.allocate(0, 40 << 30), process.allocate(1, 40 << 30)
    assert first != second
    assert process.free(second) == OK
    assert [process.devices.allocated(0), process.devices.allocated(1)] == [40 << 30, 0]


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (0, {}, "count 0"),
        (65, {}, "count 65"),
        (1, {"granularity_bytes": 1000}, "granularity"),
        (1, {"capacity_bytes": 0}, "capacity"),
        (1, {"cross_stream": "sometimes"}, "cross_stream 'sometimes'"),
    ],
)
def test_what_cannot_be_opened_is_a_value_error(
    count: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_process(count, **options)


# --- real GPUs ------------------------------------------------------------------------------------


def test_opening_gpus_starts_nothing() -> None:
    # In a process of its own: the devices opened there are never closed.
    program = (
        "import vramx._core as core; devices = core.open_gpus(devices=[0]); "
        "assert devices.started() == [] and devices.held() == 0 and devices.handle_address; "
        "print('libcuda' in open('/proc/self/maps').read())"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.skipif(bool(core.probe_cuda()["devices"]), reason="there is a GPU")
def test_without_a_gpu_the_device_says_why() -> None:
    process = Process(core.open_gpus())
    assert process.try_allocate(0, MIB) == (UNAVAILABLE, 0)
    assert process.devices.failure_text().startswith("GPU 0 cannot be used: libcuda.so.1 failed")


@pytest.mark.gpu
def test_a_gpu_serves_a_block_and_takes_it_back() -> None:
    process = Process(core.open_gpus(limit_bytes=64 * MIB))
    block = process.allocate(0, 16 * MIB)
    assert process.devices.held(0) == 16 * MIB
    assert process.try_allocate(0, 128 * MIB)[0] == OUT_OF_MEMORY
    assert process.free(block) == OK
    process.devices.trim(0)
    assert process.devices.held(0) == 0
    assert process.devices.check() == ""


def test_the_plain_functions_are_exported() -> None:
    library = ctypes.CDLL(core.__file__)
    for name in ("malloc", "free", "record_stream", "empty_cache", "memory_fraction", "begin_pool"):
        assert getattr(library, f"vramx_plain_{name}")
