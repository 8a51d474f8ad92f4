"""offload_optimizer: what fails within a step leaves all states where a step finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_tools import LEAST_BYTES, LateLink, Pair, give_gradients, use
from torch import Tensor, nn

import vramx
from vramx.compression.offload.transport import Lane


class FailingLink(LateLink):
    """Fails at the next of the calls that `fails` names."""

    fails = ""

    def _check(self, name: str) -> None:
        if self.fails == name:
            self.fails = ""
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def allocate(self, nbytes: int) -> Tensor:
        self._check("allocate")
        return super().allocate(nbytes)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        self._check("copy")
        super().copy(lane, target, source)

    def mark(self, place: Any, *, timed: bool = False) -> tuple[Any, int]:
        if isinstance(place, Lane):
            self._check("mark")
        return super().mark(place, timed=timed)


def failed_step(call: str, monkeypatch: pytest.MonkeyPatch) -> tuple[FailingLink, Pair]:
    """Train, and let the third step fail where states go to the host."""
    link = FailingLink()
    use(link, monkeypatch)
    pair = Pair(steps=2)
    # One of a bucket, whose others are views of where the bucket rests.
    for optimizer, own in pair.sides:
        state = optimizer.state[own[0]]
        state["exp_avg"] = state["exp_avg"].clone()
    give_gradients(pair.streamed, 2)
    link.fails = call
    with pytest.raises(torch.OutOfMemoryError):
        pair.offloaded.step()
    return link, pair


@pytest.mark.parametrize("call", ["copy", "mark"])
def test_states_that_found_no_place_are_where_they_were_and_take_no_more_of_the_host(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pair = failed_step(call, monkeypatch)
    # Others that come to the host now come to lie where there is room.
    late = [nn.Parameter(torch.ones(600)) for _ in range(4)]
    own_of = torch.optim.AdamW(late, lr=0.01)
    vramx.offload_optimizer(own_of, bucket=3000, least=LEAST_BYTES)
    give_gradients(late, 5)
    own_of.step()
    pair.step(2, 3)
    pair.expect_alike()
    link, pair = failed_step(call, monkeypatch)
    vramx.restore(pair.offloaded)
    link.pool.collect()
    assert link.pool.used_bytes == 0


def test_an_optimizer_that_has_no_room_to_be_restored_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = FailingLink()
    use(link, monkeypatch)
    own = [nn.Parameter(torch.ones(16, 16)) for _ in range(3)]
    optimizer = torch.optim.AdamW(own)
    vramx.offload_optimizer(optimizer, in_backward=True, bucket=1024, least=LEAST_BYTES)

    def train() -> None:
        optimizer.zero_grad()
        torch.stack([p.square().sum() for p in own]).sum().backward()

    train()
    optimizer.step()
    link.fails = "allocate"
    with pytest.raises(torch.OutOfMemoryError):
        vramx.restore(optimizer)
    before = [p.detach().clone() for p in own]
    train()
    assert not any(map(torch.equal, own, before))  # each was stepped in backward
    vramx.restore(optimizer)
