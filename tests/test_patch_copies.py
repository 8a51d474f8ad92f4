"""A copy of a changed model is changed alike, and computes with its own weights."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from patch_tools import OPTIONS, OTHERS, OURS, Plain, hook, inputs, model, recompute, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vramx
from vramx.patch.module import patch_of


def saved(net: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(net, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "save": saved,
    "average": lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
}
WAYS = [
    *[(ours,) for ours in OURS],
    *itertools.permutations(OURS, 2),
    *[("hooked", ours) for ours in ("packed", "recomputed")],
    *[(ours, "hooked") for ours in OURS],
]


def changed(ways: tuple[str, ...]) -> nn.Sequential:
    net = model()
    for way in ways:
        {**OURS, **OTHERS}[way](net)
    return net


def check_is_a_copy(twin: nn.Module, net: nn.Module) -> None:
    """Check that a copy learns by itself: neither model's weights serve the other."""
    net.zero_grad(set_to_none=True)
    twin.zero_grad(set_to_none=True)
    train(twin)
    assert all(p.grad is None for p in net.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert not torch.equal(twin(inputs()), net(inputs()))
        assert not twin(inputs()).isnan().any()
        for parameter in net.parameters():
            parameter.fill_(float("nan"))
        assert not twin(inputs()).isnan().any()


@pytest.mark.parametrize("ways", WAYS, ids="+".join)
@pytest.mark.parametrize("how", ["deepcopy", "average"])
def test_copies_compute_with_their_own_weights(ways: tuple[str, ...], how: str) -> None:
    net = changed(ways)
    train(net)
    twin = COPIES[how](net)
    done = [row.done for row in vramx.report(net).rows]
    assert [row.done for row in vramx.report(twin).rows] == done
    assert [row.note for row in vramx.report(twin).rows] == [""] * len(done)
    check_is_a_copy(twin, net)
    assert len(vramx.restore(twin)) == len(vramx.restore(net)) == len(done)


@pytest.mark.parametrize("ways", [way for way in WAYS if "hooked" not in way], ids="+".join)
@pytest.mark.parametrize("how", ["pickle", "save"])
def test_models_from_files_are_changed_alike(ways: tuple[str, ...], how: str) -> None:
    net = changed(ways)
    twin = COPIES[how](net)
    done = [row.done for row in vramx.report(net).rows]
    assert [row.done for row in vramx.report(twin).rows] == done
    check_is_a_copy(twin, net)
    assert len(vramx.restore(twin)) == len(done)
    assert [type(block) for block in twin] == [Plain, nn.TransformerEncoderLayer]


def test_undoing_a_copy_leaves_the_original_and_the_other_way_round() -> None:
    for shallow in (copy.copy, copy.deepcopy, Plain._replicate_for_data_parallel):
        block = vramx.compressed_activations(Plain(), **OPTIONS)
        twin = shallow(block)
        vramx.restore(twin)
        assert len(vramx.report(block)) == 1
        twin = shallow(block)
        vramx.restore(block)
        assert len(vramx.report(twin)) == 1
        assert type(twin) is not Plain is type(block)


def test_state_goes_between_changed_and_untouched_models() -> None:
    net, other = model(), model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for change in OURS.values():
        change(net)
    assert list(net.state_dict()) == list(before)
    other.load_state_dict(net.state_dict())
    net.load_state_dict(other.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_pickled_method_of_a_module_below_ours_is_not_ours() -> None:
    block = Plain()
    block.forward = block.forward  # type: ignore[method-assign]
    vramx.compressed_activations(block, **OPTIONS)
    twin = pickle.loads(pickle.dumps(block))
    train(twin)
    assert vramx.compression_stats(twin).packed.tensors > 0


def test_copy_of_a_compiled_module_is_packed() -> None:
    compiled = vramx.compressed_activations(torch.compile(Plain(), backend="eager"), **OPTIONS)
    twin = copy.deepcopy(compiled)
    train(twin)
    assert vramx.compression_stats(twin).packed.tensors > 0
    assert vramx.compression_stats(compiled).packed.tensors == 0
    assert len(vramx.restore(twin)) == 1
    train(twin)


def test_slices_of_a_changed_model_are_unchanged_models() -> None:
    net = vramx.compressed_activations(model(), **OPTIONS)
    part = net[:1]
    assert patch_of(part) is None
    train(part)
    assert len(vramx.report(part)) == len(vramx.restore(part)) == 0
    assert type(part) is nn.Sequential


def test_subclasses_of_a_changed_modules_class_are_of_their_authors() -> None:
    class Registered(Plain):
        names: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, name: str, **options: Any) -> None:
            super().__init_subclass__(**options)
            cls.names.append(name)

    class First(Registered, name="first"):
        pass

    block = First()
    recompute(nn.Sequential(block))
    assert Registered.names == ["first"]

    class Second(type(block), name="second"):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    second = Second()
    second.load_state_dict(block.state_dict())
    assert Registered.names == ["first", "second"]
    assert torch.equal(second(inputs()), 2 * block(inputs()))


def test_class_with_a_reduction_of_its_own_is_copied_by_it() -> None:
    class Reduced(Plain):
        def __reduce__(self) -> tuple[Any, ...]:
            return type(self), (), {"training": False}

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.training = state["training"]

    block = vramx.compressed_activations(Reduced(), **OPTIONS)
    hook(nn.Sequential(block))
    twin = copy.deepcopy(block)
    assert not twin.training
    train(twin.train())
    assert vramx.compression_stats(twin).packed.tensors > 0
    assert len(vramx.restore(twin)) == 1
    assert type(twin) is Reduced
