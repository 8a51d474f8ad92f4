"""The allocator under a recorded program; tests/native/stress has random ones."""

from __future__ import annotations

from pathlib import Path

from samples import SMALL
from simulated import KIB, MIB, open_device

from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, load_trace


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


def test_a_growth_that_fails_once_is_tried_again() -> None:
    for nth in range(1, 4):  # create, map, set_access
        device = open_device(4 * MIB, granularity_bytes=16 * KIB)
        device.fail_nth_call(nth)
        device.fill(device.allocate(MIB), MIB, nth)
        assert device.check() == ""
