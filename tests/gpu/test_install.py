"""vramx's own interface on a GPU: installed once, what it reports, its limit, defragment."""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest
import torch

import vramx
from gpu.tools import LONG_SLEEP, MIB, block, core_violation, failure_of, holds, settle

pytestmark = [pytest.mark.gpu, pytest.mark.vramx_only]


# --- installing -----------------------------------------------------------------------------------


def test_torch_refuses_to_exchange_it_now() -> None:
    torch.cuda.init()
    with pytest.raises(RuntimeError, match="already initialized"):
        torch.cuda.memory.change_current_allocator(vramx.install_allocator())


# --- statistics -----------------------------------------------------------------------------------


def test_the_statistics_agree_with_torchs() -> None:
    kept, dropped = block(32 * MIB), block(64 * MIB)
    del dropped
    stats = vramx.allocator_stats()
    joint = stats.allocated_bytes + stats.native_allocated_bytes
    assert joint == torch.cuda.memory_allocated()
    assert stats.reserved_bytes + stats.native_reserved_bytes == torch.cuda.memory_reserved()
    assert stats.reserved_bytes >= stats.allocated_bytes >= 32 * MIB
    assert f"device {torch.cuda.current_device()}" in str(stats)
    del kept


def test_ordinary_memory_is_the_cores_and_not_torchs() -> None:
    """A shim that passed everything on would pass every other test of this folder."""
    before = vramx.allocator_stats().allocated_bytes
    kept = block(32 * MIB)
    assert vramx.allocator_stats().allocated_bytes == before + 32 * MIB
    del kept


# --- the limit ------------------------------------------------------------------------------------


def test_the_limit_caps_and_lifting_it_lifts_the_cap() -> None:
    settle()
    limit = torch.cuda.memory_reserved() + 900 * MIB
    try:
        vramx.set_limit(limit)
        held = [block(256 * MIB) for _ in range(3)]
        failure_of(lambda: block(256 * MIB))
        assert torch.cuda.memory_reserved() <= limit
    finally:
        vramx.set_limit(None)
    held.append(block(256 * MIB))


def test_the_limit_counts_what_pools_hold_too() -> None:
    settle()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = block(512 * MIB)
    try:
        # Room for the block, for the comparison with its bytes, and for the result of that.
        vramx.set_limit(torch.cuda.memory_reserved() + 320 * MIB)
        failure_of(lambda: block(512 * MIB))
        outside = block(128 * MIB)
        assert holds(outside.fill_(3), 3)
    finally:
        vramx.set_limit(None)
    del inside, pool


# --- fragmentation --------------------------------------------------------------------------------


def scattered(count: int, size_bytes: int) -> list:
    """Fill memory with numbered blocks and free every second one: half of it is gaps."""
    tensors = [block(size_bytes, index % 251) for index in range(count)]
    tensors[1::2] = [None] * (count // 2)
    return tensors


def check_numbers(tensors: list) -> None:
    for index, tensor in enumerate(tensors):
        assert tensor is None or holds(tensor, index % 251)


def test_gaps_serve_a_block_that_fits_none_of_them_and_defragment_leaves_it_intact() -> None:
    tensors = scattered(count=64, size_bytes=32 * MIB)
    held = torch.cuda.memory_reserved()
    large = block(512 * MIB, 7)
    assert torch.cuda.memory_reserved() == held, "1 GiB of gaps holds 512 MiB"
    report = vramx.defragment()
    assert held - torch.cuda.memory_reserved() == report.released_bytes
    assert holds(large, 7)
    check_numbers(tensors)
    second = block(256 * MIB, 9)
    assert holds(second, 9)
    assert holds(large, 7)
    check_numbers(tensors)
    assert core_violation() == ""


def test_defragment_under_load_touches_nothing() -> None:
    """While kernels run on two streams and another thread allocates and frees."""
    stop, failures = threading.Event(), []

    def load() -> None:
        order = random.Random(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                value = order.randrange(1, 250)
                tensor = block(order.randrange(1, 64) * MIB, value)
                if not holds(tensor, value):
                    failures.append(value)

    tensors = scattered(count=64, size_bytes=16 * MIB)
    side, sums = torch.cuda.Stream(), []
    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(10):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(LONG_SLEEP // 50)
                sums.append(tensors[2].sum(dtype=torch.int64))
            vramx.defragment()
            large = block(128 * MIB, 7)
            assert holds(large, 7)
    finally:
        stop.set()
        thread.join()
    torch.cuda.synchronize()
    assert failures == []
    assert [each.item() for each in sums] == [2 * 16 * MIB] * 10
    check_numbers(tensors)


def test_a_program_that_has_settled_calls_the_driver_no_more() -> None:
    def step() -> None:
        kept = [block((1 + index * 7 % 13) * 3 * MIB) for index in range(40)]
        del kept[::3]
        kept.append(block(200 * MIB))

    def driver_calls() -> dict[str, int]:
        calls = dataclasses.asdict(vramx.allocator_stats().driver_calls)
        del calls["time_us"]
        return calls

    # Where others left gaps behind, so short a program is sure of its places only after two
    # thousand requests: 49 steps.
    for _ in range(53):
        step()
    settled = driver_calls()
    for _ in range(10):
        step()
    assert driver_calls() == settled
