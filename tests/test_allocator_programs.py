"""The allocator under random programs: every block keeps its bytes, whatever else happens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from samples import SMALL
from simulated import KIB, MIB, UNIT, live, open_device

from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, load_trace

if TYPE_CHECKING:
    from vramx._core import SimulatedDevice


class RandomProgram:
    """Takes and frees blocks at random and shadows them: each has a pattern that nothing disturbs.

    Small sizes and a device of 4 MiB, so that every path is taken within a few hundred steps.
    """

    STREAMS = (0, 7, 8)

    def __init__(self, device: SimulatedDevice, seed: int) -> None:
        self.device = device
        self.random = random.Random(seed)
        self.blocks: dict[int, tuple[int, int]] = {}  # address: size and pattern
        self.addresses: list[int] = []

    def step(self, number: int) -> None:
        choice = self.random.random()
        if choice < 0.55 or not self.blocks:
            self.take(number)
        elif choice < 0.9:
            self.free(self.random.choice(list(self.blocks)))
        elif choice < 0.95:
            address = self.random.choice(list(self.blocks))
            self.device.record_stream(address, self.random.choice(self.STREAMS))
        elif choice < 0.98:
            self.device.submit(self.random.choice(self.STREAMS))
        else:
            self.device.trim()

    def take(self, pattern: int) -> None:
        size = self.random.randrange(4, 1 << self.random.randrange(8, 21), 4)
        stream = self.random.choice(self.STREAMS)
        try:
            address = self.device.allocate(size, stream)
        except MemoryError:
            return
        self.addresses.append(address)
        assert address not in self.blocks
        self.blocks[address] = (size, pattern)
        self.device.fill(address, size, pattern)

    def free(self, address: int) -> None:
        size, pattern = self.blocks.pop(address)
        assert self.device.count_mismatches(address, size, pattern) == 0
        self.device.free(address)

    def live_bytes(self) -> int:
        return sum(-(-size // UNIT) * UNIT for size, _ in self.blocks.values())


def small_device() -> SimulatedDevice:
    return open_device(4 * MIB, granularity_bytes=16 * KIB)


@pytest.mark.parametrize("seed", range(6))
def test_no_block_disturbs_another_in_any_program(seed: int) -> None:
    program = RandomProgram(small_device(), seed)
    for number in range(400):
        program.step(number)
        assert program.device.check() == ""
        assert live(program.device) == program.live_bytes()
    for address in list(program.blocks):
        program.free(address)
    assert program.device.stats()["num_stitches"] > 0, "the program is too tame to mean anything"


def test_one_program_has_one_placement() -> None:
    # Bases differ from device to device; what lies where above them does not.
    layouts = []
    for _ in range(2):
        program = RandomProgram(small_device(), seed=3)
        for number in range(300):
            program.step(number)
        spans = program.device.layout()
        base = spans[0]["address"]
        layouts.append([(s["address"] - base, s["size"], s["state"]) for s in spans])
    assert layouts[0] == layouts[1]


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
        device = small_device()
        device.fail_nth_call(nth)
        device.fill(device.allocate(MIB), MIB, nth)
        assert device.check() == ""
