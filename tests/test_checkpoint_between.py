"""What a program changes between a forward pass and its backward pass is not in a recomputation.

Backward runs when loops are over, adapters are switched and hooks are off again: the gradient is
that of the call. Where it cannot be, a warning says so.
"""

# ruff: noqa: B023 - the functions of a loop are what is tested

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from checkpoint_tools import LEVELS, WIDTH, activation, check_near, plain, quiet, seeds
from torch import Tensor, nn

import vramx

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

Call = Callable[..., Any]
CHECKPOINT = functools.partial(vramx.checkpoint, level="keep")


class Adapted(nn.Module):
    """A layer with adapters of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.active, self.scales = "a", {"a": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        side = self.adapters[self.active](x * self.scales["a"])
        return (self.drop(self.layer(x)) + side.tanh()).sin()


def hooked(net: Adapted) -> None:
    net.layer.register_forward_hook(lambda _, __, y: -y)
    net.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


CHANGES: dict[str, Callable[[Adapted], Any]] = {
    "another adapter": lambda net: setattr(net, "active", "b"),
    "another scale": lambda net: net.scales.update(a=9.0),
    "evaluated": lambda net: net.eval(),
    "frozen": lambda net: net.layer.requires_grad_(requires_grad=False),
    "a part replaced": lambda net: net.adapters.update({"a": nn.Linear(WIDTH, WIDTH)}),
    "a hook taken off": lambda net: net.adapters["a"]._forward_hooks.popitem(),
    "hooks put on": hooked,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["module", "function"])
def test_what_a_module_is_next_is_not_recomputed(change: str, way: str) -> None:
    found = []
    for call in (plain, CHECKPOINT):
        torch.manual_seed(0)
        net, x = Adapted(), activation(8, WIDTH)
        learnt = list(net.parameters())  # before some are replaced
        net.adapters["a"].register_forward_hook(lambda _, __, y: 3 * y)
        loss = call(net if way == "module" else lambda x: net(x * 1.0), x).square().mean()
        CHANGES[change](net)
        now = vars(net) | {"modules": list(net.modules())}
        loss.backward()
        assert vars(net) | {"modules": list(net.modules())} == now
        found.append([p.grad for p in learnt if p.grad is not None])
    check_near(*found, "keep")


# Each program gives the function that is called next, and gets what it returned.
Program = Generator[Call, Tensor, None]


def of_a_loop(layers: nn.ModuleList) -> Program:
    for layer in layers:
        yield lambda x: layer(x).sin()


def of_an_index(layers: nn.ModuleList) -> Program:
    for i in range(len(layers)):
        yield lambda x: layers[i](x).sin() * (i + 1) * x


def of_a_decorator(layers: nn.ModuleList) -> Program:
    def decorated(function: Call) -> Call:
        @functools.wraps(function)
        def around(*args: Any) -> Any:
            return function(*args)

        return around

    for layer in layers:
        yield decorated(lambda x: layer(x).sin())


def of_a_growing_list(layers: nn.ModuleList) -> Program:
    before = list[Tensor]()
    for layer in layers:
        before.append((yield lambda x: layer(sum(before, x)).sin()))


def of_a_counter(layers: nn.ModuleList) -> Program:
    count = 0

    def block(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return layers[count - 1](x * count).sin()

    for _ in layers:
        yield block
    assert count == len(layers)


def of_globals(layers: nn.ModuleList) -> Program:
    names: dict[str, Any] = {"layers": layers}
    exec("block = lambda x: sum((lambda: layer(x).sin())() for _ in range(2))", names)
    for layer in layers:
        names["layer"] = layer
        yield names["block"]


PROGRAMS = (of_a_loop, of_an_index, of_a_decorator, of_a_growing_list, of_a_counter, of_globals)


@pytest.mark.parametrize("program", PROGRAMS)
@LEVELS
def test_a_function_has_the_variables_of_its_call(program: Any, level: Any) -> None:
    found = []
    for call in (plain, functools.partial(vramx.checkpoint, level=level)):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        calls, x = program(layers), activation(8, WIDTH)
        with contextlib.suppress(StopIteration):
            function = next(calls)
            while True:
                x = call(function, x)
                function = calls.send(x)
        found.append(torch.autograd.grad(x.square().sum(), list(layers.parameters())))
    check_near(*found, level)


class Keeps(nn.Module):
    """Keeps losses for its program, which takes them before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.losses, self.calls = nn.Linear(WIDTH, WIDTH), list[Tensor](), 0

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(x.mean())
        self.calls, self.last = self.calls + 1, x
        return self.layer(x * 1.0).sin()


@pytest.mark.parametrize("way", ["attributes", "closure"])
def test_what_a_program_has_taken_is_not_put_there_again(way: str) -> None:
    net, losses = Keeps(), list[Tensor]()

    def region(x: Tensor) -> Tensor:
        losses.append(x.mean())
        return (x * 1.0).sin()

    y = CHECKPOINT(net if way == "attributes" else region, activation())
    losses.clear()
    net.losses.clear()
    net.calls = 0
    vars(net).pop("last", None)
    y.sum().backward()
    assert (losses, net.losses, net.calls, hasattr(net, "last")) == ([], [], 0, False)
