"""A link whose copies run as late as they may, for tests of offloaded optimizers.

One to the device runs when the main stream waits for it, one to the host when a copy to the device
waits for it or the host does. So a wait that is missing reads or keeps what was there before, which
is poison.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vramx.compression import pinned
from vramx.compression.transport import Lane
from vramx.optimizers import offload, rounds
from vramx.optimizers.states import plain_tensors

POISON = 0xDD


class LateLink:
    """A transport on the host. `forgets` names a wait that it drops."""

    def __init__(self, forgets: str = "") -> None:
        self.forgets = forgets
        self.host_is_full = False
        self.pending: dict[Lane, list[Callable[[], Any]]] = {lane: [] for lane in Lane}
        self.done: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self.copies = 0
        self.pool = pinned.HostPool(self.pin, 1 << 40)
        self.transport = self
        self.lock = threading.Lock()

    def stream(self) -> str:
        return "main"

    def capturing(self) -> bool:
        return False

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def pin(self, nbytes: int) -> Tensor:
        if self.host_is_full:
            raise RuntimeError("no more memory to pin")
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def mark(self, place: Any, *, timed: bool = False) -> tuple[Any, int]:
        of_lane = isinstance(place, Lane)
        return place, self.done[place] + len(self.pending[place]) if of_lane else 0

    def wait(self, place: Any, event: tuple[Any, int]) -> None:
        name = f"{getattr(place, 'value', place)} after {getattr(event[0], 'value', event[0])}"
        if name == self.forgets:
            return
        if place == "main":
            self.synchronize(event)
        elif event[0] != "main":
            self.pending[place].append(lambda: self.synchronize(event))

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        self.pending[lane].append(lambda: target.copy_(source))

    def used_by(self, memory: Tensor, place: Any) -> None: ...

    def synchronize(self, event: tuple[Any, int]) -> None:
        lane, count = event
        while lane != "main" and self.done[lane] < count:
            self.done[lane] += 1
            self.pending[lane].pop(0)()


def use(link: LateLink, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (offload, rounds):
        monkeypatch.setattr(module, "link_of", lambda _: link)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateLink]:
    made = LateLink()
    use(made, monkeypatch)
    yield made
    made.pool.check()


def values_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = sorted(optimizer.state_dict()["state"].items())
    return [t.clone() for _, state in states for t in plain_tensors(state)]


def expect_alike(a: Any, b: Any) -> None:
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left, right)
