"""Buffers that leave the device and come back: their bytes, their memory, their time."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_link import BLOCK_BYTES, POISON, FakeLink
from torch import nn

import vramx
from vramx.compression import offload
from vramx.compression.budget import Budget
from vramx.compression.config import Compression, Format
from vramx.compression.parcel import State
from vramx.compression.pinned import HostPool
from vramx.compression.stash import Stash, Ticket
from vramx.compression.transport import Lane
from vramx.errors import ModifiedInPlaceError, OffloadError
from vramx.sizes import MIB

STREAMS = ("main", "other", Lane.TO_HOST.value, Lane.TO_DEVICE.value)
ORDERS = list(itertools.permutations(STREAMS))
LIMIT_BYTES = 256 * MIB


def stash_on(link: FakeLink, share: str | float = 1.0, window_blocks: int = 2) -> Stash:
    pool = HostPool(link.pin, LIMIT_BYTES)
    return Stash(share, link, pool, window_bytes=window_blocks * BLOCK_BYTES)


def forward(link: FakeLink, stash: Stash, count: int = 8) -> list[Ticket]:
    """Put buffers of the values 1, 2, ... that nobody else holds."""
    tickets = []
    for value in range(1, count + 1):
        tickets.append(stash.put(link.produce(value)))
        stash.check()
    return tickets


def backward(link: FakeLink, stash: Stash, tickets: list[Ticket]) -> list[torch.Tensor]:
    """Read the tickets, the last first, and drop each; return what was read, in order of put."""
    read = []
    while tickets:
        read.append(link.read(tickets.pop().get()))
        stash.check()
    return read[::-1]


def is_intact(read: list[torch.Tensor]) -> bool:
    return all(bool((tensor == value).all()) for value, tensor in enumerate(read, start=1))


def states(tickets: list[Ticket]) -> list[State]:
    return [ticket._parcel.state for ticket in tickets]


# -- The bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_bytes_survive_whatever_stream_is_late(order: tuple[str, ...]) -> None:
    link = FakeLink()
    stash = stash_on(link)
    first = backward(link, stash, forward(link, stash))
    second = backward(link, stash, forward(link, stash))
    link.run(order)
    assert is_intact(first)
    assert is_intact(second)
    assert stash.returned_bytes > 0, "nothing came back from the host"


@pytest.mark.parametrize(
    ("forgotten", "reader", "count"),
    [
        # The buffer is copied before it was written.
        ("to the host after main", "main", 8),
        # Its memory is given away before it was copied.
        ("main after to the host", "main", 8),
        # It comes back while another still has the memory.
        ("to the device after main", "main", 8),
        # It comes back before it has gone; the last ones would hide it, for they are waited for.
        ("to the device after to the host", "other", 4),
        # It is read before it came back.
        ("main after to the device", "main", 8),
        # Its own stream gives it away while another reads it.
        ("used by", "other", 8),
    ],
)
def test_a_forgotten_wait_is_found(forgotten: str, reader: str, count: int) -> None:
    def survives(order: tuple[str, ...]) -> bool:
        link = FakeLink(forgets=forgotten)
        stash = stash_on(link)
        tickets = forward(link, stash)
        del tickets[count:]
        link.current = link.other if reader == "other" else link.main
        read = backward(link, stash, tickets)
        link.run(order)
        return is_intact(read)

    assert not all(survives(order) for order in ORDERS)


@pytest.mark.parametrize("forgotten", ["", "to the host after to the device"])
def test_host_memory_is_written_again_after_it_was_read(forgotten: str) -> None:
    def survives(order: tuple[str, ...]) -> bool:
        link = FakeLink(forgets=forgotten)
        stash = stash_on(link, window_blocks=1)
        tickets = forward(link, stash, count=2)
        link.run()
        read = link.read(tickets[0].get())
        del tickets[:]
        # Another stream, which does not wait for the first one, takes the same host memory.
        link.current = link.other
        others = [stash.put(link.produce(9)) for _ in range(2)]
        link.run(order)
        del others
        return bool((read == 1).all())

    assert all(survives(order) for order in ORDERS) == (forgotten == "")


@pytest.mark.parametrize("seed", range(20))
def test_bytes_survive_any_program(seed: int) -> None:
    """Puts, gets out of order, second gets, drops, and streams that run in between."""
    chance = random.Random(seed)
    link = FakeLink(blocks=128)
    stash = stash_on(link, window_blocks=chance.choice([1, 3]))
    tickets: dict[int, Ticket] = {}
    read: list[tuple[int, torch.Tensor]] = []
    for value in range(1, 120):
        tickets[value] = stash.put(link.produce(value))
        for _ in range(chance.randrange(3)):
            known = chance.choice(list(tickets))
            read.append((known, link.read(tickets[known].get())))
            if chance.random() < 0.6:
                del tickets[known]
            if not tickets:
                break
        if chance.random() < 0.2:
            link.run(seed=seed)
        stash.check()
    link.run(seed=seed)
    assert all(bool((tensor == value).all()) for value, tensor in read)


def test_a_buffer_can_be_asked_for_again() -> None:
    link = FakeLink()
    stash = stash_on(link)
    tickets = forward(link, stash)
    first = backward(link, stash, list(tickets))
    second = backward(link, stash, list(tickets))
    link.run()
    assert is_intact(first)
    assert is_intact(second)


@pytest.mark.parametrize("order", ORDERS)
def test_another_stream_may_ask(order: tuple[str, ...]) -> None:
    link = FakeLink()
    stash = stash_on(link)
    tickets = forward(link, stash)
    link.current = link.other
    read = backward(link, stash, tickets)
    link.run(order)
    assert is_intact(read)


def test_a_change_in_place_before_the_copy_is_seen() -> None:
    link = FakeLink()
    stash = stash_on(link, window_blocks=1)
    buffer = link.produce(1)
    ticket = stash.put(buffer)
    buffer.add_(1)
    with pytest.raises(ModifiedInPlaceError):
        ticket.get()
    del buffer
    _others = forward(link, stash)
    assert states([ticket]) == [State.AWAY]
    with pytest.raises(ModifiedInPlaceError, match="while it was being copied"):
        ticket.get()


# -- The memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3])
def test_the_device_keeps_a_window_of_what_leaves(window: int) -> None:
    link = FakeLink()
    blocks = link.free_blocks
    tickets = forward(link, stash_on(link, window_blocks=window), count=8)
    assert blocks - link.free_blocks == window
    assert states(tickets) == [State.AWAY] * (8 - window) + [State.LEAVING] * window


def test_backward_holds_a_window_of_what_comes() -> None:
    link = FakeLink()
    stash = stash_on(link, window_blocks=2)
    tickets = forward(link, stash)
    backward(link, stash, tickets[6:])
    del tickets[6:]
    blocks = link.free_blocks
    tickets[5].get()
    assert states(tickets) == [State.AWAY] * 3 + [State.COMING] * 2 + [State.AWAY]
    assert blocks - link.free_blocks <= 1, "more than the one that came instead of one that left"


def test_backward_fetches_ahead_while_it_needs_what_stayed() -> None:
    link = FakeLink()
    stash = stash_on(link, 0.5, window_blocks=2)
    moved_in_a_step(link, stash)
    tickets = forward(link, stash)
    assert states(tickets) == [State.AWAY] * 2 + [State.LEAVING] * 2 + [State.RESIDENT] * 4
    backward(link, stash, tickets[7:])
    assert states(tickets)[1] == State.COMING


def test_what_left_last_is_not_copied_back() -> None:
    link = FakeLink()
    stash = stash_on(link, window_blocks=2)
    tickets = forward(link, stash)
    tickets[7].get()
    assert states(tickets[6:]) == [State.LEAVING] * 2
    assert stash.returned_bytes <= 2 * BLOCK_BYTES, "more than the prefetch"


@pytest.mark.parametrize("asked", [(), (7,), (2, 5)])
def test_a_graph_that_is_dropped_leaves_nothing(asked: tuple[int, ...]) -> None:
    link = FakeLink()
    stash = stash_on(link)
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


def test_a_thousand_steps_hold_what_one_held() -> None:
    link = FakeLink()
    stash = stash_on(link)
    held = []
    for _ in range(1000):
        backward(link, stash, forward(link, stash, count=6))
        link.run()
        held.append((stash.host_bytes, len(stash._order), len(stash._leaving), link.free_blocks))
    assert held[1] == held[-1]


def test_pinned_memory_is_bounded() -> None:
    link = FakeLink()
    pool = HostPool(link.pin, limit_bytes=4 * BLOCK_BYTES)
    stash = Stash(1.0, link, pool, window_bytes=BLOCK_BYTES)
    tickets = forward(link, stash, count=8)
    assert pool.held_bytes <= 4 * BLOCK_BYTES
    assert (stash.refused, stash.kept_bytes) == (4, 4 * BLOCK_BYTES)
    read = backward(link, stash, tickets)
    link.run()
    assert is_intact(read)


def test_a_host_without_memory_keeps_everything_on_the_device() -> None:
    link = FakeLink()
    link.host_is_full = True
    stash = stash_on(link)
    tickets = forward(link, stash)
    assert states(tickets) == [State.RESIDENT] * 8
    assert stash.refused == 8


def test_a_copy_that_fails_takes_no_memory() -> None:
    link = FakeLink()
    stash = stash_on(link)
    blocks = link.free_blocks
    link.fails = True
    with pytest.raises(RuntimeError, match="the copy failed"):
        stash.put(link.produce(1))
    gc.collect()
    stash.collect()
    stash.check()
    assert (stash._pool.used_bytes, link.free_blocks) == (0, blocks)


def test_nothing_leaves_under_capture() -> None:
    link = FakeLink()
    stash = stash_on(link)
    link.is_capturing = True
    tickets = forward(link, stash, count=3)
    assert (stash.captured, stash.moved_bytes) == (3, 0)
    read = backward(link, stash, tickets)
    link.run()
    assert is_intact(read)
    link.is_capturing = False
    assert moved_in_a_step(link, stash) == 8, "what was captured counts in no step"


def test_what_is_away_cannot_be_asked_for_under_capture() -> None:
    link = FakeLink()
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


# -- What leaves ----------------------------------------------------------------------------------


def moved_in_a_step(link: FakeLink, stash: Stash, count: int = 8) -> int:
    before = stash.moved_bytes
    backward(link, stash, forward(link, stash, count))
    link.run()
    return (stash.moved_bytes - before) // BLOCK_BYTES


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.5, 4), (0.25, 2), (1.0, 8)])
def test_a_fraction_of_the_bytes_leaves_the_oldest_first(share: float, expected: int) -> None:
    link = FakeLink()
    stash = stash_on(link, share, window_blocks=8)
    moved_in_a_step(link, stash)
    tickets = forward(link, stash)
    assert states(tickets) == [State.LEAVING] * expected + [State.RESIDENT] * (8 - expected)


def test_everything_leaves_in_the_first_step() -> None:
    link = FakeLink()
    assert moved_in_a_step(link, stash_on(link, 0.25)) == 8
    assert moved_in_a_step(link, stash_on(link, "cpu")) == 8


def test_an_old_graph_that_is_kept_does_not_stop_the_counting_of_steps() -> None:
    link = FakeLink(blocks=256)
    stash = stash_on(link, 0.5)
    moved_in_a_step(link, stash)
    _kept = forward(link, stash, count=1)
    moved = [moved_in_a_step(link, stash) for _ in range(6)]
    assert moved[-1] >= 4


def timed_step(link: FakeLink, stash: Stash, layer_ms: float, count: int = 8) -> None:
    """One step of a program that computes as long in backward as in forward."""
    tickets = []
    for value in range(1, count + 1):
        link.compute(layer_ms)
        tickets.append(stash.put(link.produce(value)))
    while tickets:
        link.read(tickets.pop().get())
        link.compute(layer_ms)
    link.run()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramx.compression.budget._TIMED_BYTES", 1)


@pytest.mark.parametrize(
    ("copy_ms", "expected"),
    [
        (0.5, 8),  # the link is faster than the layers
        (2.0, 3),  # from the first put to the end of forward there are 7 ms: 3.5, less the margin
        (8.0, 1),  # one
    ],
)
@pytest.mark.usefixtures("timed")
def test_cpu_moves_what_the_link_hides(copy_ms: float, expected: int) -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / copy_ms
    stash = stash_on(link, "cpu")
    for _ in range(4):
        timed_step(link, stash, layer_ms=1.0)
    before = stash.moved_bytes
    timed_step(link, stash, layer_ms=1.0)
    assert (stash.moved_bytes - before) // BLOCK_BYTES == expected


@pytest.mark.usefixtures("timed")
def test_cpu_spreads_what_leaves_over_the_step() -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 2.0
    stash = stash_on(link, "cpu")
    for _ in range(4):
        timed_step(link, stash, layer_ms=1.0)
    left = [state is not State.RESIDENT for state in states(forward(link, stash))]
    assert left == [True, False, False, False, False, True, False, True]


@pytest.mark.usefixtures("timed")
def test_the_report_tells_bandwidth_and_what_was_hidden() -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 2.0
    stash = stash_on(link, 1.0)
    for _ in range(3):
        timed_step(link, stash, layer_ms=1.0)
    report = offload.report_of(torch.device("cuda", 0), stash)
    assert report.to_host_bytes_per_s == pytest.approx(1e3 * link.bytes_per_ms)
    assert report.to_device_bytes_per_s == pytest.approx(1e3 * link.bytes_per_ms)
    # All but the window is 12 ms of the 16 that copies take each way; from the first put to the end
    # of forward there are 7 ms, and as many of backward.
    assert report.hidden_predicted == pytest.approx(1 - (12 - 7 + 12 - 7) / 32)
    assert report.hidden_measured == pytest.approx(report.hidden_predicted, abs=0.1)
    assert report.moved_bytes == 24 * BLOCK_BYTES
    assert "hidden" in str(report)


def test_a_step_on_two_streams_is_measured_once_both_are_done() -> None:
    link = FakeLink()
    budget = Budget("cpu", link)
    budget.put(1)
    budget.begin_get()
    link.current = link.other
    before = link.mark(link.current, timed=True)
    link.compute(3.0)
    budget.waited(before, link.mark(link.current, timed=True))
    link.current = link.main
    budget.end_get()
    budget.get(budget.step)
    while link.main.step():
        pass
    for is_measured in (False, True):
        budget.put(1)
        budget.get(budget.step)
        assert (budget.measured.waited_ms == 3.0) is is_measured
        link.run()


@pytest.mark.usefixtures("timed")
def test_a_fast_link_is_hidden_wholly() -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 0.25
    stash = stash_on(link, 1.0)
    for _ in range(3):
        timed_step(link, stash, layer_ms=1.0)
    report = offload.report_of(torch.device("cuda", 0), stash)
    assert report.hidden_predicted == 1.0
    # The first layer's copy back is asked for when it is needed: it cannot be prefetched sooner.
    assert report.hidden_measured > 0.8


# -- In compression -------------------------------------------------------------------------------


class InstantLink(FakeLink):
    """Runs all that it is asked for at once, on memory of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(lane, target, source)
        self.run()


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stash]]:
    """Give the CPU a link; the list has its stash."""
    link = InstantLink()
    stashes = [Stash(1.0, link, HostPool(link.pin, LIMIT_BYTES), window_bytes=0)]
    monkeypatch.setattr(offload, "stash_of", lambda device, share: stashes[0])
    yield stashes
    gc.collect()
    stashes[0].collect()
    assert stashes[0]._pool.used_bytes == 0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Tanh())


def gradients(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    model = net()
    leaf = torch.randn(64, 32, requires_grad=True)
    vramx.manual_seed(3)
    run(model, leaf * 1.0).square().sum().backward()
    return [p.grad for p in model.parameters()] + [leaf.grad]


def compressed(share: float | None) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with vramx.compress(min_bytes=0, offload=share):
            return model(x)

    return run


def checkpointed(options: Any, share: float | None) -> Callable[..., torch.Tensor]:
    return lambda model, x: vramx.checkpoint(model, x, compress=options, offload=share)


@pytest.mark.parametrize(
    "run",
    [compressed, lambda share: checkpointed(Compression(min_bytes=0), share)],
    ids=["compress", "checkpoint"],
)
def test_gradients_are_those_without_offload(run: Any, linked: list[Stash]) -> None:
    kept, moved = gradients(run(None)), gradients(run(1.0))
    assert linked[0].returned_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(kept, moved, strict=True))


def test_an_exact_checkpoint_can_be_offloaded(linked: list[Stash]) -> None:
    leaf = torch.randn(512, 512, requires_grad=True)  # 1 MiB, from which on inputs are moved
    weight = torch.zeros(512, 512, requires_grad=True)
    vramx.checkpoint(torch.mul, leaf * 1.0, weight, compress=None, offload=1.0).sum().backward()
    assert linked[0].returned_bytes == 1 << 20
    assert torch.equal(weight.grad, leaf)


def test_without_a_link_nothing_moves() -> None:
    codec = offload.OffloadCodec(1.0)
    x = torch.randn(1000)
    payload = codec.encode(x, Format())
    assert codec.decode(payload).shape == x.shape
    assert vramx.offload_report() == ()
