"""Modules of kinds of their own that are changed: compiled, lazy, parametrized, of odd classes."""

from __future__ import annotations

import abc
import copy
import functools
import pickle
import types
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pytest
import torch
from patch_tools import (
    OPTIONS,
    Plain,
    Wrapper,
    error,
    gradients,
    inputs,
    is_equal,
    recompute,
    states,
    train,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import vramx
from vramx.errors import InvalidValueError
from vramx.patch import function
from vramx.patch.change import Change
from vramx.patch.module import put

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("wrap", [Wrapper, functools.partial(torch.compile, backend="eager")])
def test_model_is_found_within_modules_around_it(wrap: Any) -> None:
    inner = vramx.compressed_activations(Plain(), **OPTIONS)
    outer = wrap(inner)
    train(outer)
    assert vramx.compression_stats(outer).packed.tensors == 2  # the batch is kept
    vramx.compressed_activations(outer, level="int4", **OPTIONS)
    assert [row.done for row in vramx.report(outer).rows] == ["packed in int4"]
    assert len(vramx.restore(outer)) == 1
    assert type(inner) is Plain


class Counts(Plain):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_compiled_module_is_packed_and_restored_and_may_set_attributes() -> None:
    compiled = torch.compile(Plain(), backend="eager")
    before = states(compiled)
    vramx.compressed_activations(compiled, **OPTIONS)
    train(compiled)
    assert vramx.compression_stats(compiled).packed.tensors == 2  # the batch is kept
    vramx.restore(compiled)
    assert states(compiled)[0] == before[0]
    train(compiled)
    block = Counts()
    recompute(nn.Sequential(block))
    compiled = torch.compile(block, backend="eager")
    for _ in range(2):
        train(compiled)
    assert block.calls >= 2


def test_module_whose_class_cannot_be_followed_is_named_and_nothing_is_changed() -> None:
    net = nn.Sequential(Plain(), torch.jit.script(nn.Linear(2, 2)))
    before = states(net)
    with pytest.raises(InvalidValueError, match=r"RecursiveScriptModule .* as a part"):
        vramx.checkpoint_modules(net, where=lambda module: module in net.children())
    assert states(net) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("part", ["", "1"], ids=["all", "a part"])
def test_torchscript_of_a_changed_module_is_one_clear_line(part: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    vramx.compressed_activations(net.get_submodule(part))
    with pytest.raises(InvalidValueError, match=r"a Sequential that .* call vramx\.restore\(\)"):
        torch.jit.script(net)
    vramx.restore(net)
    torch.jit.script(net)


class Scaled(Plain):
    """Asks of its own class what is below it, as programs of Python 2 did."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(type(self), self).forward(x) * 2  # type: ignore[misc]

    def train(self, mode: bool = True) -> Scaled:
        super(self.__class__, self).train(mode)
        self.up.eval()
        return self


def test_class_that_asks_for_its_own_class_finds_the_one_below() -> None:
    net = nn.Sequential(Scaled(), Scaled())
    expected = net(inputs())
    vramx.compressed_activations(net[0], min_bytes=0)
    assert torch.equal(net(inputs()), expected)
    assert not net.train()[0].up.training
    assert net[0].training


class Named(Protocol):
    name: str


class Abstract(abc.ABC, nn.Module):
    """What many programs derive their models from; as bases of it, others have no __dict__."""

    registered: ClassVar[list[Any]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Abstract.registered.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    @abc.abstractmethod
    def between(self, x: torch.Tensor) -> torch.Tensor: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class OfABC(Abstract):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


Of = TypeVar("Of")


class OfGeneric(Generic[Of], Plain): ...


class Slotted:
    __slots__ = ()
    registered: ClassVar[list[Any]] = []

    def __init_subclass__(cls) -> None:
        Slotted.registered.append(cls)


BASES: list[Any] = [abc.ABC, Generic[TypeVar("Item")], Named, Slotted]


@pytest.mark.parametrize("base", BASES, ids=str)
def test_class_with_a_base_without_attributes_before_module_is_changed(base: Any) -> None:
    own = {"forward": Plain.forward}
    cls: Any = types.new_class("Mixed", (base, Plain), exec_body=lambda names: names.update(own))
    net = nn.Sequential(cls())
    before, expected = states(net), gradients(net)
    vramx.compressed_activations(net[0], **OPTIONS)
    assert isinstance(net[0], cls)
    assert 0 < error(gradients(net), expected) < 0.05
    assert 0 < error(gradients(copy.deepcopy(net)), expected) < 0.05
    vramx.restore(net)
    assert states(net)[0] == before[0]
    assert is_equal(gradients(net), expected)


def test_such_a_class_keeps_its_changes_when_a_parametrization_is_removed() -> None:
    class Mixed(Slotted, nn.Linear):
        pass

    layer = parametrizations.weight_norm(Mixed(2, 2))
    ran = list[Any]()
    put(layer, Noting(ran))
    parametrize.remove_parametrizations(layer, "weight")
    layer(torch.randn(4, 2))
    assert ran == [layer]
    vramx.restore(layer)
    assert type(layer) is Mixed


class OfSlots(Slotted, Plain): ...


def of_width(module: nn.Module) -> torch.Tensor:
    return inputs() if isinstance(module, Plain) else torch.randn(4, 8)


@pytest.mark.parametrize("cls", [OfABC, OfGeneric, OfSlots])
def test_classes_whose_first_base_has_no_dict_are_changed(cls: Any) -> None:
    model = nn.Sequential(cls(), cls())
    known = [*Abstract.registered, *Slotted.registered]
    x = of_width(model[0])
    expected = model(x)
    vramx.compressed_activations(model[0], **OPTIONS)
    vramx.checkpoint_modules(model, where=lambda module: module is model[1], level="keep")
    for changed in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(changed(x), expected)
        changed(x).sum().backward()
        assert [row.name for row in vramx.report(changed).rows] == ["0", "1"]
        assert all(isinstance(each, cls) for each in changed)
        assert type(changed[0]).__mro__.index(cls) < type(changed[0]).__mro__.index(nn.Module)
    assert vramx.compression_stats(model[0]).packed.tensors > 0
    vramx.restore(model)
    assert [type(each) for each in model] == [cls, cls]
    assert [*Abstract.registered, *Slotted.registered] == known


class Learner(abc.ABC):  # noqa: B024 - as libraries have it
    """What a library puts beside the class of a module, to have a copy with weights of its own."""

    fast: Any = None


@pytest.mark.parametrize("cls", [Plain, OfABC, OfGeneric])
def test_a_class_may_be_made_of_that_of_a_changed_module_and_an_abstract_one(cls: Any) -> None:
    module = cls()
    x = of_width(module)
    expected = module(x)
    vramx.compressed_activations(module, **OPTIONS)
    made = type("Functional", (type(module), Learner), {})
    functional = made.__new__(made)
    vars(functional).update(vars(module))
    assert isinstance(functional, cls)
    assert isinstance(functional, Learner)
    assert torch.equal(functional(x), expected)
    assert torch.equal(module(x), expected)
    vramx.restore(module)
    assert type(module) is cls


@pytest.mark.parametrize("order", ["parametrize put take restore", "put parametrize restore take"])
def test_parametrizations_of_such_a_class_come_and_go(order: str) -> None:
    layer = OfABC()
    x = of_width(layer)
    expected = layer(x)
    steps: dict[str, Any] = {
        "parametrize": lambda: parametrize.register_parametrization(layer, "scale", nn.Identity()),
        "take": lambda: parametrize.remove_parametrizations(layer, "scale"),
        "put": lambda: vramx.compressed_activations(layer, **OPTIONS),
        "restore": lambda: vramx.restore(layer),
    }
    layer.scale = nn.Parameter(torch.ones(1))
    for step in order.split():
        steps[step]()
        assert torch.equal(layer(x), expected)
        assert isinstance(layer.scale, torch.Tensor)
    assert type(layer) is OfABC


class Noting(Change):
    """Notes of which module it has run a call."""

    def __init__(self, ran: list[Any]) -> None:
        self._ran = ran

    def run(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._ran.append(module)
        return forward(*args, **kwargs)

    def __str__(self) -> str:
        return "noted"


@pytest.mark.parametrize("part", [nn.LazyLinear(8), nn.LazyBatchNorm1d()], ids=str)
def test_a_lazy_module_keeps_its_changes_when_it_is_made(part: nn.Module) -> None:
    ran = list[Any]()
    put(part, Noting(ran))
    for _ in range(2):
        part(torch.randn(4, 8))
    assert ran == [part, part]
    vramx.restore(part)
    assert type(part) in (nn.Linear, nn.BatchNorm1d)


@pytest.mark.parametrize(
    "order",
    [
        "parametrize put take restore",
        "parametrize put restore take",
        "put parametrize take restore",
        "put parametrize restore take",
        "parametrize put more restore less take",
    ],
)
def test_parametrizations_come_and_go_around_a_change(order: str) -> None:
    layer, x, ran = nn.Linear(8, 8), torch.randn(4, 8), list[Any]()
    expected = layer(x)
    steps: dict[str, Any] = {
        "parametrize": lambda: parametrizations.weight_norm(layer),
        "more": lambda: parametrize.register_parametrization(layer, "bias", nn.Identity()),
        "put": lambda: put(layer, Noting(ran)),
        "less": lambda: parametrize.remove_parametrizations(layer, "bias"),
        "take": lambda: parametrize.remove_parametrizations(layer, "weight"),
        "restore": lambda: vramx.restore(layer),
    }
    is_changed = False
    for step in order.split():
        steps[step]()
        is_changed = step == "put" or (is_changed and step != "restore")
        ran.clear()
        torch.testing.assert_close(layer(x), expected)
        assert bool(ran) == is_changed, step
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("wraps", [True, False])
def test_a_forward_that_a_program_gives_the_class_is_that_of_the_class(wraps: bool) -> None:
    class Own(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    net, other, x, ran = Own(), Own(), inputs(), list[Any]()
    expected, others = net(x) * 2, other(x) * 2
    put(net, Noting(ran))
    below: Any = type(net).forward if wraps else Plain.forward
    type(net).forward = lambda self, x: below(self, x) * 2  # type: ignore[method-assign]
    assert torch.equal(net(x), expected)
    assert ran == [net]
    assert torch.equal(other(x), others)
    put(other, Noting(ran))
    assert torch.equal(other(x), others)
    assert ran == [net, other]
    vramx.restore(net)
    assert torch.equal(net(x), expected)
    del type(other).forward
    assert torch.equal(net(x), expected / 2)


def test_compiled_code_of_what_stands_in_calls_finds_torch() -> None:
    """Where a result is an output of transformers, torch 2.6 has it look among globals."""
    model = nn.Sequential(nn.Linear(2, 2))
    vramx.checkpoint_modules(model, where=nn.Linear)
    wrapped = function.wrap(len, Change())
    kinds, runs = [Change], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        ours = kind is not Change and kind.__module__.startswith("vramx.")
        runs += [kind.run] if ours and "run" in vars(kind) else []
    assert len(runs) > 1
    for called in (type(model[0]).forward, wrapped, *runs):
        assert called.__globals__.get("torch") is torch, called
