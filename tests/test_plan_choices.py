"""plan() of models whose blocks choose by value, and of blocks that are not the same twice.

A mixture of experts sends a token more to an expert where its input moves a little. It is planned
like any other model, and trains as planned. What cannot be recomputed is one error that says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plan_tools import PACKED_ROWS, WIDTH, counted_time
from torch import Tensor, nn
from torch.nn.functional import gelu

import vramx
from vramx.errors import InvalidValueError, VramxWarning

__all__ = ["counted_time"]
pytestmark = pytest.mark.usefixtures("_quiet", "counted_time")


@pytest.fixture
def _quiet() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VramxWarning)
        yield


class Experts(nn.Module):
    """A block that gives each token to one of its experts, and each expert its tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).topk(1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).any(-1).nonzero().flatten()
            result = result.index_add(0, rows, gelu(expert(y[rows])) * weights[rows])
        return x + result


class Unsteady(nn.Module):
    """A block of which every other call saves more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(gelu(x) if self.calls % 2 else x[: len(x) // 2].sin())


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def stack(block: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(block() for _ in range(2))), torch.randn(PACKED_ROWS, WIDTH)


def test_a_mixture_of_experts_is_planned_and_trains_as_planned() -> None:
    model, x = stack(Experts)
    x.requires_grad_()
    expected = gradient(model, x)
    plan = vramx.plan(model, (x,), "smallest", levels=["left", "recompute_all"])
    assert "recompute_all" in plan.words.values()
    plan.apply()
    for _ in range(2):
        torch.testing.assert_close(gradient(model, x), expected)


def test_a_block_that_is_another_when_recomputed_is_one_error() -> None:
    model, x = stack(Unsteady)
    x.requires_grad_()
    options: dict[str, Any] = {"budget": "smallest", "levels": ["left", "recompute_all"]}
    with pytest.raises(InvalidValueError, match=r"Sequential does not do again.*levels=\('left'"):
        vramx.plan(model, (x,), **options)
    assert "forward" not in vars(model[0])
