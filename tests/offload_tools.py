"""What the tests of offloading share: steps of a program on a FakeLink, and what became of them.

A step puts buffers whose bytes are all 1, 2, ... and reads them back, the last first; the stash
checks itself after each. The link's streams run when a test says so, or at the end of
moved_in_a_step().
"""

from __future__ import annotations

import pytest
import torch
from fake_link import BLOCK_BYTES, FakeLink

from vramx.compression.offload.parcel import State
from vramx.compression.offload.pinned import HostPool
from vramx.compression.offload.stash import Stash, Ticket
from vramx.sizes import MIB

LIMIT_BYTES = 256 * MIB


def stash_on(link: FakeLink, share: str | float = 1.0, window_blocks: int = 2) -> Stash:
    pool = HostPool(link.pin, LIMIT_BYTES)
    return Stash(share, link, pool, window_bytes=window_blocks * BLOCK_BYTES)


def copying_in(copy_ms: float) -> FakeLink:
    """Return a link that copies a block in so many milliseconds."""
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / copy_ms
    return link


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def stash(link: FakeLink) -> Stash:
    return stash_on(link)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time copies of any size."""
    monkeypatch.setattr("vramx.compression.offload.budget._TIMED_BYTES", 1)


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


def moved_in_a_step(link: FakeLink, stash: Stash, count: int = 8) -> int:
    before = stash.moved_bytes
    backward(link, stash, forward(link, stash, count))
    link.run()
    return (stash.moved_bytes - before) // BLOCK_BYTES
