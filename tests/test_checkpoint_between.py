"""What a program changes between a forward pass and its backward pass is not in a recomputation.

Backward runs when loops are over, adapters are switched and hooks are off again: the gradient is
that of the call. Where it cannot be, a warning says so.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, activation, quiet, seeds
from torch import Tensor, nn

import vramx
from vramx import errors
from vramx.errors import VramxWarning

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds")

Call = Callable[..., Any]


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


def switched(net: Adapted) -> None:
    net.active = "b"


def rescaled(net: Adapted) -> None:
    net.scales["a"] = 9.0


def evaluated(net: Adapted) -> None:
    net.eval()


def frozen(net: Adapted) -> None:
    net.layer.requires_grad_(requires_grad=False)


def replaced(net: Adapted) -> None:
    net.adapters["a"] = nn.Linear(WIDTH, WIDTH)


def unhooked(net: Adapted) -> None:
    net.adapters["a"]._forward_hooks.popitem()


def hooked(net: Adapted) -> None:
    net.layer.register_forward_hook(lambda _, __, y: -y)
    net.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


CHANGES = (switched, rescaled, evaluated, frozen, replaced, unhooked, hooked)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["module", "function"])
def test_what_a_module_is_next_is_not_recomputed(change: Call, way: str) -> None:
    found = []
    for call in (None, functools.partial(vramx.checkpoint, level="keep")):
        torch.manual_seed(0)
        net, x = Adapted(), activation(8, WIDTH)
        learnt = list(net.parameters())  # before some are replaced
        net.adapters["a"].register_forward_hook(lambda _, __, y: 3 * y)
        function = net if way == "module" else lambda x: net(x * 1.0)  # noqa: B023 - called here
        loss = (function(x) if call is None else call(function, x)).square().mean()
        change(net)
        now = vars(net) | {"modules": list(net.modules())}
        loss.backward()
        assert vars(net) | {"modules": list(net.modules())} == now
        found.append([p.grad for p in learnt if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def of_a_loop(call: Call, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = call(lambda x: layer(x).sin(), x)  # noqa: B023 - it is what is tested
    return x


def of_an_index(call: Call, layers: Any, x: Tensor) -> Tensor:
    for i in range(len(layers)):
        x = call(lambda x: layers[i](x).sin() * (i + 1) * x, x)  # noqa: B023
    return x


def decorated(function: Call) -> Call:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args)

    return around


def of_a_decorator(call: Call, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = call(decorated(lambda x: layer(x).sin()), x)  # noqa: B023
    return x


def of_a_growing_list(call: Call, layers: Any, x: Tensor) -> Tensor:
    before = [x]
    for layer in layers:
        before.append(call(lambda _: layer(sum(before)).sin(), before[-1]))  # noqa: B023
    return before[-1]


def of_a_counter(call: Call, layers: Any, x: Tensor) -> Tensor:
    count = 0

    def block(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return layers[count - 1](x * count).sin()

    for _ in layers:
        x = call(block, x)
    assert count == len(layers)
    return x


class Trainer:
    def __init__(self, layers: Any) -> None:
        self.layers, self.steps, self.log = layers, 0, list[int]()

    def block(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.log.append(self.steps)
        return self.layers[len(self.log) - 1](x * self.steps).sin()


def of_a_method(call: Call, layers: Any, x: Tensor) -> Tensor:
    trainer = Trainer(layers)
    for _ in layers:
        x = call(trainer.block, x)
    assert trainer.log == [1, 2, 3]
    return x


def of_an_object_that_is_closed_over(call: Call, layers: Any, x: Tensor) -> Tensor:
    trainer, scale = Trainer(layers), types.SimpleNamespace(now=1.0)
    for i in range(len(layers)):
        scale.now = 1 / (i + 1)
        x = call(lambda x: trainer.block(x * scale.now), x)
    assert trainer.log == [1, 2, 3]
    return x


class Called(Trainer):
    def __call__(self, x: Tensor) -> Tensor:
        return self.block(x)


def of_an_object_that_is_called(call: Call, layers: Any, x: Tensor) -> Tensor:
    called = Called(layers)
    for _ in layers:
        x = call(called, x)
    return x


def of_defaults(call: Call, layers: Any, x: Tensor) -> Tensor:
    def block(x: Tensor, seen: list[int] = [], *, by: dict[str, float] = {}) -> Tensor:  # noqa: B006
        seen.append(len(seen))
        by["scale"] = by.get("scale", 0.0) + 0.5
        return layers[seen[-1]](x * by["scale"]).sin()

    for _ in layers:
        x = call(block, x)
    return x


def of_partials(call: Call, layers: Any, x: Tensor) -> Tensor:
    def block(seen: list[int], x: Tensor, by: dict[str, float]) -> Tensor:
        seen.append(len(seen))
        return layers[seen[-1]](x * by["scale"]).sin()

    options: dict[str, float] = {}
    given = functools.partial(block, [], by=options)
    for i in range(len(layers)):
        options["scale"] = 1 / (i + 1)
        x = call(given, x)
    return x


def of_iterators(call: Call, layers: Any, x: Tensor) -> Tensor:
    parts, pairs = iter(layers), enumerate(zip("abc", [1.0, 0.5, 0.2], strict=True))

    def block(x: Tensor) -> Tensor:
        number, (_, scale) = next(pairs)
        return next(parts)(x * scale).sin() * (number + 1)

    for _ in layers:
        x = call(block, x)
    return x


def of_an_array(call: Call, layers: Any, x: Tensor) -> Tensor:
    counts = np.zeros(4)

    def block(x: Tensor) -> Tensor:
        counts[1:] += 1
        return layers[int(counts[1]) - 1](x * counts.mean()).sin()

    for _ in layers:
        x = call(block, x)
    assert counts.tolist() == [0, 3, 3, 3]
    return x


CODE = """
for layer in layers:
    x = call(lambda x: sum((lambda: layer(x).sin())() for _ in range(2)), x)
"""


def of_globals(call: Call, layers: Any, x: Tensor) -> Tensor:
    names = {"layers": layers, "call": call, "x": x}
    exec(CODE, names)
    return names["x"]


FUNCTIONS = (
    *(of_a_loop, of_an_index, of_a_decorator, of_a_growing_list, of_a_counter, of_a_method),
    *(of_globals, of_iterators, of_an_array, of_an_object_that_is_closed_over),
    *(of_an_object_that_is_called, of_defaults, of_partials),
)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("program", FUNCTIONS)
@pytest.mark.parametrize("level", ["keep", SMALL], ids=["exact", "int8"])
def test_a_function_has_the_variables_of_its_call(program: Call, level: Any) -> None:
    found = []
    plain = lambda function, *args: function(*args)  # noqa: E731
    for call in (plain, functools.partial(vramx.checkpoint, level=level)):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        y = program(call, layers, activation(8, WIDTH))
        found.append(torch.autograd.grad(y.square().sum(), list(layers.parameters())))
    for one, other in zip(*found, strict=True):
        if level == "keep":
            assert torch.equal(one, other)
        cosine = nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0)
        assert cosine > 0.999


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

    y = vramx.checkpoint(net if way == "attributes" else region, activation(), level="keep")
    losses.clear()
    net.losses.clear()
    net.calls = 0
    if way == "attributes":
        del net.last
    y.sum().backward()
    assert (losses, net.losses, net.calls, hasattr(net, "last")) == ([], [], 0, False)


def taken_from_an_argument(x: Tensor, source: Any) -> Tensor:
    return x.sin() * next(source)


def closing_over(source: Any) -> Call:
    return lambda x, _: x.sin() * next(source)


class Takes(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source, self.unused = source, (i for i in range(3))

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return x.sin() * next(self.source)


@pytest.mark.parametrize("way", ["argument", "closure", "attribute"])
def test_a_generator_that_a_region_reaches_is_told_of(way: str) -> None:
    source = (float(i) for i in range(4))
    function, given = taken_from_an_argument, source
    if way == "closure":
        function, given = closing_over(source), None
    elif way == "attribute":
        function, given = Takes(source), None
    errors._said.clear()
    with pytest.warns(VramxWarning, match="reaches a generator, which cannot be copied"):
        vramx.checkpoint(function, activation(8, WIDTH), given, level="keep")


def test_a_generator_that_no_call_takes_from_is_not_told_of() -> None:
    errors._said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vramx.checkpoint(Takes(iter([1.0])), activation(8, WIDTH), None, level="keep")


def test_a_tensor_of_a_function_that_it_writes_into_is_told_of() -> None:
    mean = torch.zeros(WIDTH)

    def region(x: Tensor) -> Tensor:
        mean.lerp_(x.detach().mean(0), 0.1)
        return (x - mean).square()

    errors._said.clear()
    with pytest.warns(VramxWarning, match="region under vramx.checkpoint writes into a tensor"):
        vramx.checkpoint(region, activation(8, WIDTH), level="keep")


def test_parameters_that_were_written_into_are_told_of() -> None:
    """As torch raises an error where it has kept them."""
    layer, w = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH, requires_grad=True)
    for region, parameter in ((layer, layer.weight), (lambda x: (x * w).sin(), w)):
        errors._said.clear()
        y = vramx.checkpoint(region, activation(8, WIDTH), level="keep")
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.warns(VramxWarning, match="ahead of backward"):
            y.sum().backward()
        y = vramx.checkpoint(region, activation(8, WIDTH), level="keep")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y.sum().backward()


def test_parameters_of_a_recomputed_block_that_were_written_into_are_told_of() -> None:
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    vramx.optimize(block, "recompute_all")
    errors._said.clear()
    y = block(torch.randn(2, 4, 16, requires_grad=True))
    with torch.no_grad():
        block.linear1.weight.mul_(2)
    with pytest.warns(VramxWarning, match="ahead of backward"):
        y.sum().backward()
