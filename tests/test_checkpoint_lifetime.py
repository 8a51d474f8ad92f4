"""What a recomputed module had before a call goes when its next call has put something else there.

A module may keep what it makes, and no backward pass come by it: attention maps, features for a
look at them, losses of a router that count nothing.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import Seen, quiet, seeds
from torch import Tensor, nn

import vramx
from vramx.errors import RecomputationError

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

WIDTH = 8


class Keeps(nn.Module):
    """Keeps what it makes beside its result."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.aside = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.keep = keep
        self.kept: Any = None
        self.items: list[Any] = []
        self.last: deque[Any] = deque(maxlen=1)
        self.register_buffer("state", torch.zeros(1), persistent=False)
        self.noted: dict[str, Tensor] = {}
        self.aside.register_forward_hook(lambda *call: noted.update(made=call[2]))
        noted = self.noted

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        self.keep(self, self.aside(hidden).tanh())
        result: Tensor = self.down(hidden)
        return result


def _replace_items(module: Keeps, made: Tensor) -> None:
    module.items.clear()
    module.items.append(made)


KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "nowhere but by a hook": lambda *_: None,
    "in an attribute": lambda module, made: setattr(module, "kept", made),
    "in a tuple": lambda module, made: setattr(module, "kept", (made, (made,))),
    "in an object": lambda module, made: setattr(module, "kept", types.SimpleNamespace(map=made)),
    "in a list in place": _replace_items,
    "in a queue": lambda module, made: module.last.append(made),
    "in a buffer": lambda module, made: setattr(module, "state", made),
    "in a layer of torch": lambda module, made: setattr(module.up, "map", made),
}


def _alive_after(steps: int, step: Callable[[], Tensor]) -> int:
    for _ in range(steps):
        step().sum().backward()
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("level", ["keep", "int8"])
@pytest.mark.parametrize("where", KEPT)
def test_what_a_module_keeps_of_a_call_goes_with_the_next(where: str, level: Any) -> None:
    net = Keeps(KEPT[where])
    vramx.checkpoint_modules(net, lambda module: module is net, level=level)

    def step() -> Tensor:
        made: Tensor = net(torch.ones(4, WIDTH, requires_grad=True))
        return made

    assert _alive_after(3, step) == _alive_after(4, step)


@pytest.mark.parametrize("where", KEPT)
def test_what_a_module_within_another_keeps_goes_too(where: str) -> None:
    net = nn.Sequential(Keeps(KEPT[where]), nn.Linear(WIDTH, WIDTH))
    regions = (net, net[0])
    vramx.checkpoint_modules(net, lambda module: module in regions, level="keep")

    def step() -> Tensor:
        made: Tensor = net(torch.ones(4, WIDTH, requires_grad=True))
        return made

    assert _alive_after(4, step) == _alive_after(3, step)


class Slotted:
    """An argument whose attributes are slots."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "an object": (
        lambda: types.SimpleNamespace(state=None),
        lambda node, made: setattr(node, "state", made),
    ),
    "an object with slots": (Slotted, lambda node, made: setattr(node, "state", made)),
    "an object in a list": (
        lambda: [types.SimpleNamespace(state=None)],
        lambda nodes, made: setattr(nodes[0], "state", made),
    ),
    "an object with a list": (
        lambda: types.SimpleNamespace(states=[None]),
        lambda node, made: node.states.__setitem__(0, made),
    ),
}


@pytest.mark.parametrize("level", ["keep", "int8"])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_a_module_keeps_in_an_argument_goes_with_the_next_call(kind: str, level: Any) -> None:
    """A node of a tree keeps the state that its children, or its parent, are made from."""
    make, put = ARGUMENTS[kind]
    node = make()
    net = Keeps(lambda *_: None)

    def function(node: Any, x: Tensor) -> Tensor:
        hidden = net.up(x).tanh()
        put(node, net.aside(hidden).tanh())
        result: Tensor = net.down(hidden)
        return result

    def step() -> Tensor:
        made: Tensor = vramx.checkpoint(function, node, torch.ones(4, WIDTH), level=level)
        return made

    assert _alive_after(3, step) == _alive_after(4, step)


@pytest.mark.parametrize("level", ["keep", "int8"])
def test_a_state_in_an_argument_that_is_handed_on_has_its_gradient(level: Any) -> None:
    def gradient(*, checkpointed: bool) -> Tensor:
        torch.manual_seed(0)
        inner, node = nn.Linear(WIDTH, WIDTH), types.SimpleNamespace(state=torch.ones(4, WIDTH))

        def function(node: Any, x: Tensor) -> Tensor:
            made: Tensor = torch.tanh(inner(x) + node.state * node.state)
            node.state = made
            return made

        run: Any = vramx.checkpoint if checkpointed else lambda f, *args, **_: f(*args)
        total = torch.zeros(())
        for i in range(3):
            total = total + run(function, node, torch.ones(4, WIDTH) * i, level=level).sum()
        total.backward()
        found: Any = inner.weight.grad
        return found

    torch.testing.assert_close(gradient(checkpointed=True), gradient(checkpointed=False))


def test_what_a_function_keeps_of_a_call_goes_with_the_next() -> None:
    net = Keeps(KEPT["nowhere but by a hook"])
    kept, items = None, [torch.zeros(1)]

    def function(x: Tensor) -> Tensor:
        nonlocal kept
        hidden = net.up(x).tanh()
        kept = items[0] = net.aside(hidden).tanh()
        result: Tensor = net.down(hidden)
        return result

    def step() -> Tensor:
        made: Tensor = vramx.checkpoint(function, torch.ones(4, WIDTH), level="keep")
        return made

    assert _alive_after(3, step) == _alive_after(4, step)
    assert kept is not None


@pytest.mark.parametrize("where", ["a local", "an argument", "a variable"])
def test_what_regions_within_a_region_keep_of_its_recomputation_goes(where: str) -> None:
    """The graph of the recomputation holds them, and they what holds that graph."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    shared: dict[Any, Tensor] = {}

    def region(x: Tensor) -> Tensor:
        found = {} if where == "a local" else shared

        def inner(y: Tensor, layer: nn.Module, into: dict[Any, Tensor] | None = None) -> Tensor:
            made: Tensor = layer(y).tanh()
            (found if into is None else into)[layer] = made
            return made

        given = (found,) if where == "an argument" else ()
        for layer in layers:
            x = vramx.checkpoint(inner, x, layer, *given, level="keep")
        return x * x

    def step() -> Tensor:
        x = torch.ones(4, WIDTH, requires_grad=True)
        made: Tensor = vramx.checkpoint(region, x, level="keep")
        return made

    assert _alive_after(3, step) == _alive_after(4, step)


def test_what_a_recomputation_made_has_no_gradient_behind_it() -> None:
    layer, made = nn.Linear(WIDTH, WIDTH), Seen()

    def region(x: Tensor) -> Tensor:
        made.append(vramx.checkpoint(layer, x, level="keep"))
        return made[-1].tanh()

    x = torch.ones(4, WIDTH, requires_grad=True)
    vramx.checkpoint(region, x, level="keep").sum().backward()
    with pytest.raises(RecomputationError, match="after that recomputation"):
        made[-1].sum().backward()


@pytest.mark.parametrize("where", ["in an attribute", "in a list", "in a variable"])
def test_a_state_that_is_handed_on_has_its_gradient(where: str) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            before = self.state[0] if where == "in a list" else self.state
            made = torch.tanh(self.inner(x) + (0 if before is None else before * before))
            self.state = [made] if where == "in a list" else made
            return made

    def gradient(*, checkpointed: bool) -> Tensor:
        torch.manual_seed(0)
        cell = Cell()
        if where == "in a list":
            cell.state = [None]
        state = None

        def function(x: Tensor) -> Tensor:
            nonlocal state
            state = cell.inner(x).tanh() * (1 if state is None else state * state)
            return state

        run: Any = function if where == "in a variable" else cell
        total = torch.zeros(())
        for x in torch.linspace(-2, 2, 5 * WIDTH).view(5, WIDTH):
            made = vramx.checkpoint(run, x, level="keep") if checkpointed else run(x)
            total = total + made.square().sum()
        total.backward()
        assert cell.inner.weight.grad is not None
        return cell.inner.weight.grad

    assert torch.equal(gradient(checkpointed=True), gradient(checkpointed=False))


class RefusedError(Exception):
    """Stands for an out-of-memory error that a program answers with its next batch."""


class Fills(nn.Module):
    """Adds what it makes to the list of a holder, its own without one, and fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.items: list[Tensor] = []

    def forward(self, x: Tensor, holder: Any = None) -> Tensor:
        holder = self if holder is None else holder
        holder.items.clear()
        for _ in range(2):
            x = self.layer(x).tanh()
            holder.items.append(x)
        raise RefusedError


@pytest.mark.parametrize("level", ["keep", "int8"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("is_its_own", [False, True])
def test_what_a_failed_region_has_put_somewhere_goes(
    is_its_own: bool, is_nested: bool, level: Any
) -> None:
    fills, before = Fills(), nn.Linear(WIDTH, WIDTH)

    def within(x: Tensor, *holders: Any) -> Tensor:
        made: Tensor = vramx.checkpoint(fills, before(x).sin(), *holders, level=level)
        return made

    def step() -> Tensor:
        holders = () if is_its_own else (types.SimpleNamespace(items=[]),)
        x = torch.ones(4, WIDTH, requires_grad=True)
        with pytest.raises(RefusedError):
            vramx.checkpoint(within if is_nested else fills, x, *holders, level=level)
        return torch.ones((), requires_grad=True)

    assert _alive_after(3, step) == _alive_after(6, step)


@pytest.mark.parametrize("level", ["keep", "int8"])
def test_what_a_failed_region_has_made_has_its_gradient(level: Any) -> None:
    """A forward that is left by an exception once what was wanted is there."""
    layer = nn.Linear(WIDTH, WIDTH)

    def fill(x: Tensor, holder: Any, ends: bool) -> Tensor:
        holder.items.append(layer(x).tanh().square())
        if ends:
            raise RefusedError
        made: Tensor = holder.items[-1]
        return made

    gradients = []
    for ends in (True, False):
        holder = types.SimpleNamespace(items=[])
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        try:
            vramx.checkpoint(fill, x, holder, ends, level=level)
        except RefusedError:
            assert ends
        holder.items[-1].sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
