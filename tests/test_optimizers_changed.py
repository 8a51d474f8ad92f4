"""offload_optimizer: what programs do to parameters and states between two steps counts.

They are replaced where points are added or pruned (Gaussian splatting), momentum is set to zero by
assignment, groups lose a parameter and get it again, and statistics of states are read.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC
from typing import Any

import pytest
import torch
from optimizer_tools import LEAST_BYTES, Both, LateLink, OneByOne, Pair, link
from torch import nn

import vramx
from vramx.optimizers.copies import HOLDER

__all__ = ["link"]


def replaced(optimizer: torch.optim.Optimizer, own: list[nn.Parameter]) -> None:
    """A parameter is another one, which has the states of the old one, cut and grown."""
    places = optimizer.param_groups[0]["params"]
    for number in (2, 0):
        old = places[number]
        states = optimizer.state.pop(old)
        new = nn.Parameter(old.detach() * 0.5)
        for key in ("exp_avg", "exp_avg_sq"):
            states[key] = torch.cat([states[key][:4] * 2, states[key][4:]])
        optimizer.state[new] = states
        places[number] = own[number] = new


def written(optimizer: torch.optim.Optimizer, _own: list[nn.Parameter]) -> None:
    for states in optimizer.state.values():
        states["exp_avg"].mul_(0.5)


def assigned(optimizer: torch.optim.Optimizer, _own: list[nn.Parameter]) -> None:
    for states in optimizer.state.values():
        states["exp_avg"] = torch.full_like(states["exp_avg"], 0.25)


def read(optimizer: torch.optim.Optimizer, own: list[nn.Parameter]) -> None:
    """Statistics of states count in the parameters, of which the two are compared."""
    for parameter in own:
        parameter.data.mul_(1 + float(optimizer.state[parameter]["exp_avg"].norm()))


def grown(optimizer: torch.optim.Optimizer, own: list[nn.Parameter]) -> None:
    own.append(nn.Parameter(torch.ones(7, 5)))
    optimizer.add_param_group({"params": [own[-1]], "lr": 0.1})


def taken_out_and_put_back(optimizer: torch.optim.Optimizer, _own: list[nn.Parameter]) -> None:
    groups = optimizer.param_groups
    if len(groups) == 1:
        optimizer.out = groups[0]["params"].pop(0)  # type: ignore[attr-defined]
        groups.append({**groups[0], "params": []})
    else:
        groups[1]["params"] = [optimizer.out]  # type: ignore[attr-defined]


CHANGES: dict[str, Both] = {
    **{each.__name__: each for each in (replaced, written, assigned, read, grown)},
    "taken out and put back": taken_out_and_put_back,
    "started anew": lambda optimizer, own: optimizer.state.pop(own[0]),
    "loaded": lambda optimizer, _: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps_counts(link: LateLink, change: str) -> None:
    pair = Pair(steps=2)
    link.pool.collect()
    held = link.pool.used_bytes
    for seed in (2, 4):
        pair.change(CHANGES[change])
        pair.step(seed, seed + 1)
    pair.expect_alike()
    link.pool.collect()
    assert (link.pool.used_bytes > held) is (change == "grown")


def test_a_parameter_that_was_replaced_is_let_go_of(link: LateLink) -> None:
    pair = Pair(steps=1)
    link.pool.collect()
    held = link.pool.used_bytes
    gone = weakref.ref(pair.streamed[0])
    for seed in range(1, 4):
        pair.change(replaced)
        pair.step(seed)
    gc.collect()
    link.pool.collect()
    assert gone() is None
    assert link.pool.used_bytes <= held


@pytest.mark.parametrize("in_backward", [False, True])
def test_many_parameters_that_were_replaced_leave_no_trace(
    in_backward: bool, link: LateLink
) -> None:
    own = [nn.Parameter(torch.ones(16, 16)) for _ in range(3)]
    optimizer = torch.optim.AdamW(own)
    vramx.offload_optimizer(optimizer, in_backward=in_backward, bucket=1024, least=LEAST_BYTES)
    rounds, sizes = vars(optimizer)[HOLDER], []
    for _ in range(12):
        torch.stack([p.square().sum() for p in own]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append((len(rounds.buckets()), len(rounds._hooks), len(rounds._places)))
        states = optimizer.state.pop(own[0])
        own[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(own[0].detach())
        optimizer.state[own[0]] = states
    assert sizes[2] == sizes[-1]
    assert sizes[-1][1] == (3 if in_backward else 0)


def test_a_parameter_that_another_optimizer_has_now_is_stepped_by_that_alone(
    link: LateLink,
) -> None:
    own = [nn.Parameter(torch.ones(16, 16)) for _ in range(2)]
    optimizer = torch.optim.AdamW(own)
    vramx.offload_optimizer(optimizer, in_backward=True, least=LEAST_BYTES)

    def step(*optimizers: torch.optim.Optimizer) -> None:
        (own[0].square().sum() + own[1].square().sum()).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    step(optimizer)
    moved = optimizer.param_groups[0]["params"].pop(1)
    del optimizer.state[moved]
    other = torch.optim.SGD([moved], 0.25)
    step(optimizer, other)  # in backward it was still the first one's
    before = moved.detach().clone()
    step(optimizer, other)
    assert torch.equal(moved, before - 0.25 * 2 * before)


class CountsFromTheFirstStep(OneByOne):
    """The count is in the group from the first step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        del self.param_groups[0]["count"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0].setdefault("count", 0)
        super().step(closure)


class BehindAnother(ABC, OneByOne):
    """Whose first base has no attributes."""


class InSlotsItself(OneByOne):
    __slots__ = ("kept",)


@pytest.mark.parametrize("make", [CountsFromTheFirstStep, BehindAnother, InSlotsItself])
def test_classes_of_others_are_streamed_whatever_they_are_made_of(
    link: LateLink, make: Any
) -> None:
    pair = Pair(make, steps=4)
    pair.expect_alike()
    assert link.copies
    vramx.restore(pair.offloaded)
    assert type(pair.offloaded) is make
