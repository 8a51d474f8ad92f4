"""What offload_optimizer refuses, and what it tries on a small model first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_tools import OPTIMIZERS, LateLink, OneByOne, Pair, expect_alike, link, parameters
from torch import nn

import vramx
from vramx.errors import InvalidValueError, OffloadError

__all__ = ["link"]


class SumsOverAll(OneByOne):
    """Scales each step by the norm of all gradients together, as some adaptive ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            p.sub_(p.grad / norm, alpha=0.01)


class Estimates(OneByOne):
    """Learns its rate from all parameters together, as Prodigy and D-Adaptation do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["along"] = 0.0

    def change(self, state: Any, grad: torch.Tensor, count: int) -> torch.Tensor:
        first = state.setdefault("first", grad.clone())
        self.param_groups[0]["along"] += float(first.flatten() @ grad.flatten())
        # Which is of an effect only once it is large.
        return grad * max(1.0, self.param_groups[0]["along"] / 1e9)


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
        *((cls, {}, "does not treat each parameter by itself") for cls in (SumsOverAll, Estimates)),
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


def test_parameters_of_several_devices_are_refused(link: LateLink) -> None:
    several = [nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64, device="meta"))]
    optimizer = torch.optim.AdamW(several)
    with pytest.raises(OffloadError, match="parameters are on cpu, meta; accepted is one device"):
        vramx.offload_optimizer(optimizer, in_backward=True)
    assert type(optimizer) is torch.optim.AdamW
    assert link.copies == 0


class Slow(torch.optim.Optimizer):
    """An optimizer around another one, that pulls parameters back when they were stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class OfALibrary(Slow):
    __module__ = "accelerate.optimizer"


def test_what_is_around_an_optimizer_may_do_more_than_step_it(link: LateLink) -> None:
    for wrapped in (Slow, lambda inner: OfALibrary(Slow(inner))):
        inner = torch.optim.AdamW(parameters())
        with pytest.raises(OffloadError, match=r"Slow is around a AdamW.*the optimizer within"):
            vramx.offload_optimizer(wrapped(inner), in_backward=True)
        assert type(inner) is torch.optim.AdamW
        vramx.offload_optimizer(wrapped(inner))
    vramx.offload_optimizer(OfALibrary(torch.optim.AdamW(parameters())), in_backward=True)


class ForMatrices(OneByOne):
    def change(self, state: Any, grad: torch.Tensor, count: int) -> torch.Tensor:
        return super().change(state, grad, count) @ grad.T @ grad


def test_one_that_takes_matrices_alone_is_tried_with_matrices(link: LateLink) -> None:
    own = [nn.Parameter(torch.ones(16, 8)) for _ in range(2)]
    vramx.offload_optimizer(ForMatrices(own), least=64)
    with pytest.raises(InvalidValueError, match="cannot be tried on a small model"):
        vramx.offload_optimizer(ForMatrices(parameters()))


class TurnsMatrices(OneByOne):
    """Treats the matrices of one group otherwise, as Muon with an Adam of the rest does."""

    def __init__(self, own: list[nn.Parameter]) -> None:
        super().__init__([p for p in own if p.dim() != 2])
        matrices = [p for p in own if p.dim() == 2]
        self.param_groups[0]["turns"] = False
        self.add_param_group({"params": matrices, "turns": True})
        self.param_groups.reverse()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    turned = p.grad @ p.grad.T @ p.grad if group["turns"] else p.grad
                    mean = self.state[p].setdefault("mean", torch.zeros_like(turned))
                    p.sub_(mean.lerp_(turned, 0.1), alpha=group["lr"])


def test_one_that_treats_groups_otherwise_is_tried_with_a_group_of_each_kind(
    link: LateLink,
) -> None:
    Pair(TurnsMatrices, steps=3).expect_alike()


def test_what_a_trial_failed_with_is_said_where_it_has_no_words(link: LateLink) -> None:
    class Asserts(OneByOne):
        def change(self, state: Any, grad: torch.Tensor, count: int) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(InvalidValueError, match="on a small model: AssertionError"):
        vramx.offload_optimizer(Asserts(parameters()))


def test_one_that_is_made_in_a_way_of_its_own_is_tried(link: LateLink) -> None:
    pair = Pair(lambda p: Needs(p, table=(1, 2)), steps=3)
    pair.expect_alike()
    assert link.copies
