"""What offload_optimizer refuses, and what it tries on a small model first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_tools import OPTIMIZERS, LateLink, OneByOne, Pair, expect_alike, link, parameters
from torch import nn

import vramx
from vramx.errors import InvalidValueError

__all__ = ["link"]


class SumsOverAll(OneByOne):
    """Scales each step by the norm of all gradients together, as some adaptive ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            p.sub_(p.grad / norm, alpha=0.01)


class HasThemTwice(OneByOne):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.all = {"of": list(self.param_groups[0]["params"])}


class Needs(OneByOne):
    def __init__(self, parameters: Any, *, table: tuple[int, ...]) -> None:
        super().__init__(parameters)
        self.table = table


def with_a_step_of_its_own(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS["sgd"](own)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    return optimizer


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (SumsOverAll, {}, "does not treat each parameter by itself"),
        (torch.optim.LBFGS, {}, "as one vector"),
        (HasThemTwice, {}, r"cannot be tried on a small model: .* in 'all'"),
        (with_a_step_of_its_own, {}, "a step of its own"),
        (OPTIMIZERS["sgd"], {"bucket": "many"}, "bucket"),
        (lambda _: nn.Linear(2, 2), {}, "no torch.optim.Optimizer"),
        (lambda _: 3, {}, "no torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_and_unchanged(
    link: LateLink, make: Any, options: Any, said: str
) -> None:
    own = parameters()
    before, made = [p.detach().clone() for p in own], make(own)
    cls = type(made)
    with pytest.raises(InvalidValueError, match=said):
        vramx.offload_optimizer(made, **options)
    expect_alike(before, own)
    assert type(made) is cls
    assert link.copies == 0


def test_one_that_is_made_in_a_way_of_its_own_is_tried(link: LateLink) -> None:
    pair = Pair(lambda p: Needs(p, table=(1, 2)))
    pair.step(0, 1, 2)
    pair.expect_alike()
    assert link.copies
