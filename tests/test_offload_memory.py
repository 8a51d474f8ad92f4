"""Offloading and memory: what the device still holds, what the host pins, and what is given back.

The device holds a window of what leaves and of what comes back. Pinned memory is bounded; where
there is no more, buffers stay. Nothing is left of a graph that is dropped or of a copy that failed.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from fake_link import BLOCK_BYTES, FakeLink
from offload_tools import (
    LIMIT_BYTES,
    backward,
    forward,
    is_intact,
    link,
    moved_in_a_step,
    stash,
    stash_on,
    states,
)

from vramx import errors
from vramx.compression.offload import pinned
from vramx.compression.offload.parcel import State
from vramx.compression.offload.pinned import HostPool
from vramx.compression.offload.stash import Stash
from vramx.errors import OffloadError, VramxWarning
from vramx.sizes import GIB

__all__ = ["link", "stash"]


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    errors._said.clear()


@pytest.mark.parametrize("window", [1, 3])
def test_the_device_keeps_a_window_of_what_leaves(window: int, link: FakeLink) -> None:
    blocks = link.free_blocks
    tickets = forward(link, stash_on(link, window_blocks=window), count=8)
    assert blocks - link.free_blocks == window
    assert states(tickets) == [State.AWAY] * (8 - window) + [State.LEAVING] * window


def test_backward_holds_a_window_of_what_comes(link: FakeLink) -> None:
    stash = stash_on(link, window_blocks=2)
    tickets = forward(link, stash)
    backward(link, stash, tickets[6:])
    del tickets[6:]
    blocks = link.free_blocks
    tickets[5].get()
    assert states(tickets) == [State.AWAY] * 3 + [State.COMING] * 2 + [State.AWAY]
    assert blocks - link.free_blocks <= 1, "more than the one that came instead of one that left"


def test_backward_fetches_ahead_while_it_needs_what_stayed(link: FakeLink) -> None:
    stash = stash_on(link, 0.5, window_blocks=2)
    moved_in_a_step(link, stash)
    tickets = forward(link, stash)
    assert states(tickets) == [State.AWAY] * 2 + [State.LEAVING] * 2 + [State.RESIDENT] * 4
    backward(link, stash, tickets[7:])
    assert states(tickets)[1] == State.COMING


def test_what_left_last_is_not_copied_back(link: FakeLink) -> None:
    stash = stash_on(link, window_blocks=2)
    tickets = forward(link, stash)
    tickets[7].get()
    assert states(tickets[6:]) == [State.LEAVING] * 2
    assert stash.returned_bytes <= 2 * BLOCK_BYTES, "more than the prefetch"


@pytest.mark.parametrize("asked", [(), (7,), (2, 5)])
def test_a_graph_that_is_dropped_leaves_nothing(
    asked: tuple[int, ...], link: FakeLink, stash: Stash
) -> None:
    blocks = link.free_blocks
    tickets = forward(link, stash)
    for number in asked:
        link.read(tickets[number].get())
    del tickets[:]
    stash.collect()
    stash.check()
    link.run()
    assert link.free_blocks == blocks
    assert stash._pool.used_bytes == 0


def test_a_host_without_memory_keeps_everything_on_the_device_until_its_ticket_goes(
    link: FakeLink,
) -> None:
    link.host_is_full = True
    stash = stash_on(link)
    blocks = link.free_blocks
    with pytest.warns(VramxWarning, match="no more pinned memory than 0 B"):
        tickets = forward(link, stash)
    assert states(tickets) == [State.RESIDENT] * 8
    assert stash.refused == 8
    assert link.free_blocks == blocks - len(tickets)
    del tickets[:]
    assert link.free_blocks == blocks
    stash.check()


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 64], ids=["window within a step", "step within the window"])
def test_a_thousand_steps_hold_what_one_held(window: int, link: FakeLink) -> None:
    stash = stash_on(link, window_blocks=window)
    held = []
    for _ in range(1000):
        backward(link, stash, forward(link, stash, count=6))
        link.run()
        held.append((stash.host_bytes, len(stash._order), len(stash._leaving), link.free_blocks))
    assert held[1] == held[-1]


def test_pinned_memory_is_bounded(link: FakeLink) -> None:
    pool = HostPool(link.pin, limit_bytes=4 * BLOCK_BYTES)
    stash = Stash(1.0, link, pool, window_bytes=BLOCK_BYTES)
    with pytest.warns(VramxWarning, match="no more pinned memory"):
        tickets = forward(link, stash, count=8)
    assert pool.held_bytes <= 4 * BLOCK_BYTES
    assert (stash.refused, stash.kept_bytes) == (4, 4 * BLOCK_BYTES)
    read = backward(link, stash, tickets)
    link.run()
    assert is_intact(read)


@pytest.mark.parametrize("nbytes", [2_200_000_000, 4_350_000_000, 9_000_000_000])
def test_large_buffers_leave_little_pinned_memory_unused(nbytes: int) -> None:
    # As slabs of a power of two for each they would take up to twice as much. Unused are what ends
    # of buffers leave of places of 256 MiB, and the end of the last slab.
    pool = HostPool(lambda size: torch.empty(size, dtype=torch.uint8, device="meta"), 1 << 60)
    taken = [pool.take_parts(nbytes) for _ in range(28)]
    assert [sum(slot.memory.numel() for slot in slots or ()) for slots in taken] == 28 * [nbytes]
    assert pool.held_bytes <= 1.05 * 28 * nbytes
    for slots in taken:
        for slot in slots or ():
            pool.give_back(slot)
    pool.check()
    assert pool.used_bytes == 0


def test_a_buffer_lies_in_parts(
    monkeypatch: pytest.MonkeyPatch, link: FakeLink, stash: Stash
) -> None:
    monkeypatch.setattr(pinned, "_PART_BYTES", BLOCK_BYTES // 4 + 7)
    for _ in range(3):
        tickets = forward(link, stash)
        assert {len(ticket._parcel.slots) for ticket in tickets} == {4}
        read = backward(link, stash, tickets)
        link.run()
        assert is_intact(read)
    stash.collect()
    assert stash._pool.used_bytes == 0


def test_parts_are_had_together_or_not_at_all() -> None:
    pool = HostPool(lambda size: torch.empty(size, dtype=torch.uint8, device="meta"), GIB)
    assert pool.take_parts(GIB + 1) is None
    pool.check()
    assert pool.used_bytes == 0
    assert pool.take_parts(GIB) is not None


def fail_to_put(link: FakeLink, stash: Stash) -> None:
    link.fails = True
    with pytest.raises(RuntimeError, match="the copy failed"):
        stash.put(link.produce(1))
    link.fails = False
    gc.collect()


def test_a_copy_that_fails_takes_no_memory(link: FakeLink, stash: Stash) -> None:
    blocks = link.free_blocks
    fail_to_put(link, stash)
    stash.collect()
    stash.check()
    assert (stash._pool.used_bytes, link.free_blocks) == (0, blocks)


def test_a_copy_that_fails_counts_in_no_step(link: FakeLink) -> None:
    stash = stash_on(link, 0.5)
    moved_in_a_step(link, stash)
    fail_to_put(link, stash)
    assert [moved_in_a_step(link, stash) for _ in range(3)] == [4, 4, 4]


@pytest.mark.parametrize("dropped", [False, True])
def test_an_interrupt_while_memory_is_freed_is_made_up_for(
    dropped: bool, monkeypatch: pytest.MonkeyPatch, link: FakeLink
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    stash = stash_on(link, window_blocks=8 if dropped else 2)
    tickets = forward(link, stash, count=2)
    with monkeypatch.context() as patch:
        patch.setattr(stash, "_wait_for_copy", interrupt)
        if dropped:
            tickets.clear()
        with pytest.raises(KeyboardInterrupt):
            stash.put(link.produce(3))
    gc.collect()
    assert moved_in_a_step(link, stash) == 8
    tickets.clear()
    stash.collect()
    stash.check()
    assert stash._pool.used_bytes == 0


def test_nothing_leaves_under_capture(link: FakeLink, stash: Stash) -> None:
    link.is_capturing = True
    tickets = forward(link, stash, count=3)
    assert (stash.captured, stash.moved_bytes) == (3, 0)
    read = backward(link, stash, tickets)
    link.run()
    assert is_intact(read)
    link.is_capturing = False
    assert moved_in_a_step(link, stash) == 8, "what was captured counts in no step"


def test_what_is_away_cannot_be_asked_for_under_capture(link: FakeLink) -> None:
    tickets = forward(link, stash_on(link))
    link.is_capturing = True
    with pytest.raises(OffloadError, match="capture both passes"):
        tickets[0].get()


@pytest.mark.parametrize("seed", range(2))
def test_slabs_give_no_byte_twice(seed: int) -> None:
    chance = random.Random(seed)
    pool = HostPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), LIMIT_BYTES)
    slots: dict[int, Any] = {}
    for number in range(1, 200):
        slot = pool.take(chance.randrange(1, 1 << 12))
        assert slot is not None
        slot.memory.fill_(number)
        slots[number] = slot
        if chance.random() < 0.5:
            pool.give_back(slots.pop(chance.choice(list(slots))))
        pool.check()
    assert all(bool((slot.memory == number).all()) for number, slot in slots.items())
    for slot in slots.values():
        pool.give_back(slot)
    pool.check()
    assert pool.used_bytes == 0
