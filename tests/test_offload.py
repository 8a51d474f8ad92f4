"""Buffers that leave the device and come back: their bytes, and the gradients that need them.

The bytes are right in whatever order the streams run, and wrong in some order when a single wait is
forgotten. compress() and checkpoint() give the same gradients with offload as without. Memory is in
test_offload_memory.py, what leaves and when in test_offload_budget.py.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_link import POISON, FakeLink
from offload_tools import LIMIT_BYTES, backward, forward, is_intact, link, stash, stash_on, states
from torch import nn

import vramx
from vramx.compression.config import Compression, Format
from vramx.compression.offload import offload
from vramx.compression.offload.parcel import State
from vramx.compression.offload.pinned import HostPool
from vramx.compression.offload.stash import Stash, Ticket
from vramx.compression.offload.transport import Lane
from vramx.errors import ModifiedInPlaceError

__all__ = ["link", "stash"]

STREAMS = ("main", "other", Lane.TO_HOST.value, Lane.TO_DEVICE.value)
ORDERS = list(itertools.permutations(STREAMS))


# -- The bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_bytes_survive_whatever_stream_is_late(
    order: tuple[str, ...], link: FakeLink, stash: Stash
) -> None:
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


@pytest.mark.parametrize("order", ORDERS)
def test_another_stream_may_ask(order: tuple[str, ...], link: FakeLink, stash: Stash) -> None:
    tickets = forward(link, stash)
    link.current = link.other
    read = backward(link, stash, tickets)
    link.run(order)
    assert is_intact(read)


def test_a_change_in_place_before_the_copy_is_seen(link: FakeLink) -> None:
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


def test_what_a_failed_step_was_moving_is_freed_before_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = InstantLink()
    stash = Stash(1.0, link, HostPool(link.pin, LIMIT_BYTES), window_bytes=LIMIT_BYTES)
    monkeypatch.setattr(offload, "stash_of", lambda device, share: stash)
    monkeypatch.setattr(offload, "_stashes", {(0, 1.0): stash})
    model = vramx.compressed_activations(net(), min_bytes=0, offload="cpu")
    y = model(torch.randn(64, 32))
    assert stash._leaving_bytes > 0
    del y
    gc.collect()
    model.eval()(torch.randn(64, 32))
    assert stash._leaving_bytes == 0


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
    return lambda model, x: vramx.checkpoint(model, x, level=options, offload=share)


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
    vramx.checkpoint(torch.mul, leaf * 1.0, weight, level="keep", offload=1.0).sum().backward()
    assert linked[0].returned_bytes == 1 << 20
    assert torch.equal(weight.grad, leaf)


def test_without_a_link_nothing_moves() -> None:
    codec = offload.OffloadCodec(1.0)
    x = torch.randn(1000)
    payload = codec.encode(x, Format())
    assert codec.decode(payload).shape == x.shape
    assert vramx.offload_report() == ()
