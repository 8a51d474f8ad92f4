"""Parameters that a region moves, fused and lazy ones, and what attributes of modules hold."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from checkpoint_tools import WIDTH, activation, check_near, plain, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx.recompute.attributes import attributes_as_now

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")


class Follows(nn.Module):
    """Moves a parameter as it runs: of a layer that follows, or of one that learns."""

    def __init__(self, how: str = "follows") -> None:
        super().__init__()
        self.how, self.fast, self.slow = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slow.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        fast, slow = self.fast.weight, self.slow.weight
        if self.how == "follows":
            with torch.no_grad():
                slow.lerp_(fast + 1, 0.5)
        elif self.how == "follows in new memory":  # as it is often written, past the version
            slow.data = slow.data * 0.5 + fast.data
        elif self.how == "shrinks":
            fast.data.mul_(0.5)
        else:
            fast.data = fast.data * 0.5
        return (self.fast(x) - self.slow(x)).square()


@pytest.mark.parametrize(
    "how", ["follows", "follows in new memory", "shrinks", "shrinks in new memory"]
)
def test_a_parameter_that_a_region_moves_moves_once_a_step(how: str) -> None:
    exact, again = Follows(how), Follows(how)
    again.load_state_dict(exact.state_dict())
    x = activation().detach()
    same = []
    for _ in range(2):
        exact(x).sum().backward()
        vramx.checkpoint(again, x, level="keep").sum().backward()
        check_near(list(again.parameters()), list(exact.parameters()), "keep")
        assert all(isinstance(each, nn.Parameter) for each in again.parameters())
        same.append(torch.equal(exact.fast.weight.grad, again.fast.weight.grad))
        exact.zero_grad()
        again.zero_grad()
    # What learns is not copied before it is given other memory, but from the second call on.
    assert same == [how != "shrinks in new memory", True]


class Variable:
    """What a library keeps the state of a layer in, beside the module that has it for torch."""

    def __init__(self, value: Tensor) -> None:
        self.value = nn.Parameter(value, requires_grad=False)


class Drops(nn.Module):
    """A dropout by a seed of its own, which it reads and moves on where its library has it."""

    def __init__(self) -> None:
        super().__init__()
        self.variable = Variable(torch.tensor(3))
        self.linear, self.seed = nn.Linear(WIDTH, WIDTH), self.variable.value

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(int(self.variable.value))
        with torch.no_grad():
            self.variable.value.copy_(self.variable.value + 1)
        mask = torch.rand(x.shape, generator=noise) > 0.5
        return torch.tanh(self.linear(x) * mask)


def test_state_in_a_variable_of_a_library_moves_once_and_is_read_as_it_was() -> None:
    exact, again = Drops(), Drops()
    again.load_state_dict(exact.state_dict())
    x = activation().detach()
    for _ in range(2):
        exact(x).sum().backward()
        loss = vramx.checkpoint(again, x, level="keep").sum()
        version = again.seed._version
        loss.backward()
        check_near([again.linear.weight.grad], [exact.linear.weight.grad], "keep")
        assert (int(again.seed), again.seed._version) == (int(exact.seed), version)


class Tables(nn.ParameterDict):
    """Compares what it holds element by element, as a container of tensors may."""

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("there is no one truth value")

    __hash__ = nn.Module.__hash__


def test_modules_that_compare_by_their_elements_are_recomputed() -> None:
    tables = Tables({"weight": nn.Parameter(torch.randn(WIDTH, WIDTH))})
    tables.linear = nn.Linear(WIDTH, WIDTH)
    tables.calls = 0

    def region(x: Tensor) -> Tensor:
        tables.calls += 1
        return torch.tanh(tables.linear(x @ tables["weight"])) * tables.calls

    found, x = [], activation().detach()
    for call in (plain, functools.partial(vramx.checkpoint, level="keep")):
        tables.calls = 0
        tables.zero_grad()
        for _ in range(2):
            call(region, x).sum().backward()
        assert tables.calls == 2
        found.append([p.grad for p in tables.parameters()])
    check_near(*found, "keep")


class Node:
    def __init__(self, scale: float) -> None:
        self.scale, self.before, self.calls = scale, [], 0


class Made(Node):
    """A node of a graph that is copied by making it anew, from what its library stores of it."""

    def __reduce__(self) -> Any:
        return Made, (self.scale,)


class Trimmed(Node):
    """One whose copies leave out what is worked out again."""

    def __getstate__(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "before"}


class Restored(Node):
    """One that does more than to be filled where it is unpickled, as an optimizer of torch does."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("nothing is unpickled")


@pytest.mark.parametrize("kind", [Made, Trimmed, Restored])
@pytest.mark.parametrize("counts", [False, True])
def test_objects_that_are_copied_otherwise_are_found_whole(kind: type[Node], counts: bool) -> None:
    """A graph of them is followed by identity, and what a call adds to it is there once."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.first, self.last = kind(0.5), kind(2.0)
            self.last.before.append(self.first)

        def forward(self, x: Tensor) -> Tensor:
            (before,) = self.last.before
            assert counts or before is self.first
            self.last.calls += counts
            return torch.tanh(self.linear(x) * self.last.scale * before.scale) + self.last.calls * x

    exact, again = Graph(), Graph()
    again.load_state_dict(exact.state_dict())
    x = activation().detach()
    for _ in range(2):
        exact(x).sum().backward()
        vramx.checkpoint(again, x, level="keep").sum().backward()
    assert again.last.calls == exact.last.calls
    check_near(*([p.grad for p in each.parameters()] for each in (again, exact)), "keep")


def test_a_fused_block_is_recomputed_with_the_parameters_of_its_call() -> None:
    """They are the module's own again when backward runs."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True)
    x, found = torch.randn(4, 6, 16), []
    for level in ("left", "recompute_all"):
        vramx.optimize(layer, level, rounding="nearest", min_bytes=0)
        others = {n: (p.detach() * 1.5).requires_grad_() for n, p in layer.named_parameters()}
        y = torch.func.functional_call(layer, others, (x.clone().requires_grad_(),))
        found.append(torch.autograd.grad(y.square().sum(), list(others.values())))
    check_near(*found)


def test_buffers_of_a_fused_block_that_is_recomputed_move_once() -> None:
    """Of a part that is called as it is: spectral norm takes a step in each call."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True)
    nn.utils.parametrizations.spectral_norm(layer.linear1)
    fused = copy.deepcopy(layer)
    vramx.optimize(fused, "recompute_all", min_bytes=0)
    x = torch.randn(4, 6, 16)
    for each in (layer, fused):
        for _ in range(2):
            each(x.clone().requires_grad_()).square().sum().backward()
    for (name, one), other in zip(layer.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(other, one, msg=name)


def test_a_lazy_region_is_made_once() -> None:
    def steps(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.SiLU(), nn.LazyLinear(8))
        for _ in range(2):
            call(net, torch.ones(4, 8).cumsum(0)).square().sum().backward()
        return [*(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]

    found = steps(functools.partial(vramx.checkpoint, level="keep"))
    check_near(found, steps(plain), "keep")
    assert len(found) == 9


def test_a_gradient_within_a_region_moves_no_statistics() -> None:
    def gradients(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        x = torch.randn(16, 8, requires_grad=True)

        def forces(x: Tensor) -> Tensor:
            energy = block(x).tanh().sum()
            (found,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy + found.square().sum()

        for _ in range(3):
            call(forces, x).backward()
        assert x.grad is not None
        return [x.grad, *block.buffers()]

    found = gradients(functools.partial(vramx.checkpoint, level="keep"))
    check_near(found, gradients(plain), "keep")


def test_attributes_and_what_they_hold_are_put_back_in_place() -> None:
    """As trials of a plan or of a batch leave them."""
    net, shared = nn.Module(), [1, {"two": [2]}]
    net.shared, net.part = shared, nn.Linear(2, 2)
    net.state = types.SimpleNamespace(
        log=deque([shared]), seen={3}, own=numpy.random.default_rng(0)
    )
    net.part.last, net.part.own = torch.zeros(2), torch.Generator().manual_seed(0)
    drawn = net.part.own.get_state().clone()
    before, log = vars(net.part) | {}, net.state.log

    put_back = attributes_as_now(net.modules())
    shared[1]["two"].append(net)
    net.state.log.append(4)
    net.state.seen.add(5)
    net.state = net.part.later = None
    net.part.last.add_(1)
    torch.rand(2, generator=net.part.own)
    put_back()

    assert net.shared is shared
    assert shared == [1, {"two": [2]}]
    assert net.state.log is log
    assert list(log) == [shared]
    assert net.state.seen == {3}
    assert vars(net.part) == before
    assert not net.part.last.any()
    assert torch.equal(net.part.own.get_state(), drawn)


class Frozen(OrderedDict[str, Any]):
    """Refuses to change, as the config of a model of diffusers does."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("frozen")

    update = clear = pop = setdefault = __delitem__ = _refuse


def test_containers_that_refuse_to_change_are_put_back_in_their_order_and_tuples_themselves() -> (
    None
):
    net, sizes = nn.Module(), [4, 8]
    net.config = Frozen(sizes=(sizes, 1), scale=(1.0, 2.0), size=3)
    net.log = [(1, 2), ([3], (4, [5]))]
    config, held = net.config, [*net.config.values(), *net.log]

    put_back = attributes_as_now(net.modules())
    sizes.append(16)
    config["later"] = 4
    config.move_to_end("sizes")
    net.log[1][1][1].append(6)
    put_back()

    assert net.config is config
    assert list(config.items()) == [("sizes", ([4, 8], 1)), ("scale", (1.0, 2.0)), ("size", 3)]
    assert net.log == [(1, 2), ([3], (4, [5]))]
    now = [*config.values(), *net.log]
    assert all(one is other for one, other in zip(now, held, strict=True))
    assert held[0][0] is sizes


class SharesMemory(nn.Module):
    """Has a view from a time without gradients of what a graph was written into since."""

    def __init__(self, *, in_a_list: bool) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        whole = torch.zeros(2, WIDTH)
        with torch.no_grad():
            view = whole[0]
        whole[1] = self.steps * 2
        self.views: Any = [view] if in_a_list else view

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x).tanh() * self.steps
        return made


@pytest.mark.parametrize("in_a_list", [True, False])
@pytest.mark.parametrize("level", ["keep", "int8"])
def test_an_attribute_whose_memory_a_graph_was_written_into_is_left(
    in_a_list: bool, level: Any
) -> None:
    """Filters of state spaces are built up so; torch does not tell who made such a view."""
    exact, again = (SharesMemory(in_a_list=in_a_list) for _ in range(2))
    again.load_state_dict(exact.state_dict())
    x = activation().detach()
    exact(x).sum().backward()
    vramx.checkpoint(again, x, level=level).sum().backward()
    check_near([again.layer.weight.grad], [exact.layer.weight.grad], level)


class Counts(nn.Module):
    """Counts in an object, as of a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: Any = type("Counter", (), {"calls": 1})()
        self.mode: str | None = None
        self.counts = 0

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += self.counts
        return (x * self.counter.calls).sin()


def test_what_changes_under_one_kind_of_attributes_is_looked_at_under_others() -> None:
    found = []
    for call in (plain, functools.partial(vramx.checkpoint, level="keep")):
        module, gradients = Counts(), list[Tensor]()
        for mode, counts in ((None, 0), ("on", 1), (None, 1), ("on", 1), (None, 1)):
            module.mode, module.counts = mode, counts
            x = torch.linspace(-1, 1, WIDTH).requires_grad_()
            gradients += torch.autograd.grad(call(module, x * 1).sum(), x)
        found.append(gradients)
    check_near(*found, "keep")


def test_a_layer_of_torch_may_have_other_attributes_in_its_next_call() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH, requires_grad=True)
    for name in ("parents", "others"):
        layer.__dict__[name] = [nn.Tanh()]
        vramx.checkpoint(layer, x * 1, level="keep").sum().backward()
        del layer.__dict__[name]
    assert torch.equal(layer.bias.grad, torch.full((WIDTH,), 4.0))
