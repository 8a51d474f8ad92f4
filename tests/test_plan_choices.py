"""plan() of models whose blocks choose by value, and of blocks that are not the same twice.

A mixture of experts sends a token more to an expert where its input moves a little. It is planned
like any other model, and trains as planned. A block that does not do the same again is not
recomputed, and the plan says why.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from plan_tools import LEVELS, PACKED_ROWS, WIDTH, Layer, counted_time, gradient
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


TICKS = itertools.count()  # a clock, which no module has


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


class Stateful(Experts):
    """A block that draws, or counts, where torch does not see it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.how == "Python":
            return y * random.random()
        if self.how == "numpy":
            return y * numpy.random.rand()
        if self.how == "generator":
            return y * torch.rand(y.shape, generator=self.own).round()
        if self.how == "counter":
            self.calls += 1
            return y * self.calls
        if self.how == "clock":
            return y * next(TICKS)
        return y + torch.rand_like(y)


class Unsteady(Layer):
    """A block of which every other call saves more."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(gelu(x) if next(TICKS) % 2 else x[: len(x) // 2].sin())


class Inner(Layer):
    """A block that takes a gradient within itself, as of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(gelu(x))
        (force,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return x + force


class Pair(nn.Module):
    """Gives a part a function over what came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Given()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first.linear(x).sin()
        return self.second(x, lambda z: z * y)


class Given(Layer):
    def forward(self, x: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        return scaled(self.linear(gelu(x)))


class Steady(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.linear(gelu(x)))


def stack(*blocks: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """Return two of each block in a row, and a batch."""
    model = nn.Sequential(*(block() for block in blocks for _ in "12"))
    return model, torch.randn(PACKED_ROWS, WIDTH, requires_grad=True)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def smallest(model: nn.Module, x: Tensor) -> Any:
    return vramx.plan(model, (x,), "smallest", levels=LEVELS)


def test_a_mixture_of_experts_is_planned_and_trains_as_planned() -> None:
    model, x = stack(Experts)
    expected = gradient(model, lambda: loss_of(model, x))
    plan = smallest(model, x)
    assert "recompute_all" in plan.words.values()
    plan.apply()
    for _ in range(2):
        torch.testing.assert_close(gradient(model, lambda: loss_of(model, x)), expected)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (partial(Stateful, "clock"), "Stateful has no recompute_all: 0: its result differs by"),
        (Unsteady, "Unsteady has no recompute_all"),
        (Inner, "Inner has no recompute_all: 0: a trial of it, without a graph, fails: Runtime"),
    ],
)
def test_what_does_not_repeat_is_not_recomputed_and_the_plan_says_why(block: Any, why: str) -> None:
    model, x = stack(block)
    plan = smallest(model, x)
    assert set(plan.words.values()) == {"left"}
    assert why in str(plan)
    assert "forward" not in vars(model[0])


def test_a_block_that_is_given_a_graph_is_named() -> None:
    with pytest.raises(InvalidValueError, match="a Given, is given something that holds the graph"):
        vramx.plan(Pair(), (torch.randn(8, WIDTH, requires_grad=True),), levels=("left", "int8"))


def test_what_does_not_repeat_cannot_be_asked_to() -> None:
    model, x = stack(partial(Stateful, "clock"))
    with pytest.raises(InvalidValueError, match=r"0 cannot be recomputed \(its result differs by"):
        vramx.plan(model, (x,), levels="recompute_all")


def test_only_the_class_that_does_not_repeat_does_without() -> None:
    words = list(smallest(*stack(Steady, Steady, partial(Stateful, "clock"))).words.values())
    assert "recompute_all" in words[:4]
    assert set(words[4:]) == {"left"}


@pytest.mark.parametrize("how", ["Python", "numpy", "generator", "counter", "torch"])
def test_what_is_drawn_and_counted_repeats(how: str) -> None:
    model, x = stack(partial(Stateful, how))
    plain = copy.deepcopy(model)
    state, drawn = random.getstate(), numpy.random.get_state()[1].tolist()
    plan = smallest(model, x)
    assert "recompute_all" in plan.words.values()
    assert "has no" not in str(plan)
    assert random.getstate() == state
    assert numpy.random.get_state()[1].tolist() == drawn
    assert [block.calls for block in model] == [0, 0]
    plan.apply()
    found = []
    for each in (plain, model):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(1)
        for block in each:
            block.own.manual_seed(1)
        found.append(gradient(each, partial(loss_of, each, x)))
    torch.testing.assert_close(*found)


class Writes(Layer):
    """Writes into its own weights, parts and hooks' notes as it runs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.slow = copy.deepcopy(self.linear).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def write(self) -> None:
        self.calls += 1
        if self.how == "new memory":
            self.slow.weight.data = self.slow.weight.data * 0.5
        elif self.how == "in place":
            self.slow.weight.lerp_(self.linear.weight, 0.5)
        elif self.how == "a weight that learns":
            self.linear.weight.data.mul_(0.5)
        elif self.how == "a new parameter":
            self.linear.weight = nn.Parameter(self.linear.weight * 0.5)
        elif self.how == "a part that is made late" and self.calls == 2:
            self.late, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.write()
        return gelu(self.linear(x)) + self.slow(x)


WAYS = (
    *("new memory", "in place", "a weight that learns", "a new parameter"),
    "a part that is made late",
)


@pytest.mark.parametrize("how", WAYS)
def test_what_a_model_writes_while_it_is_planned_is_put_back(how: str) -> None:
    model = nn.Sequential(*(Writes(how) for _ in "12"), nn.Linear(WIDTH, 1))
    count, noted = 0, dict[str, list[int]]()

    def hook(*_: object) -> None:
        nonlocal count
        count += 1
        noted.setdefault("calls", []).append(count)

    model[0].register_forward_hook(hook)
    state = {name: (x, x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    vramx.plan(model, torch.randn(64, WIDTH), "smallest", levels=("left", "int8"))
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    for name, (tensor, value) in state.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
    assert (count, noted, model[0].calls) == (0, {}, 0)


class Critic(nn.Module):
    """Judges what a model makes: with statistics, a count and a weight that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.judge = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale.mul_(2)
        return self.judge(self.norm(x) * self.scale).mean()


def test_what_the_loss_is_made_by_is_as_before_as_well() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in "12"))
    critic, x = Critic(), torch.randn(64, WIDTH)
    critic.judge.weight.grad = gradient = torch.ones_like(critic.judge.weight)
    state = {name: value.clone() for name, value in critic.state_dict().items()}
    vramx.plan(model, lambda model: critic(model(x)), "smallest", levels=("left", "int8"))
    assert critic.calls == 0
    assert all(torch.equal(state[name], value) for name, value in critic.state_dict().items())
    assert critic.judge.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert critic.norm.weight.grad is None
