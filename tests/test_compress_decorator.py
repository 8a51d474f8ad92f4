"""compressed_activations: what is wrapped, what stays as it was, and that it can be undone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from compress_tools import Block, gradient, input_of, relative_error
from torch import nn

import vramx
from vramx.errors import InvalidValueError

OPTIONS = {"min_bytes": 0}


def packed(target: Any) -> int:
    return vramx.compression_stats(target).packed.tensors


class Plain(nn.Module):
    """A layer, with a forward that has a signature to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Scale."""
        return self.layer(x) * scale


def test_an_instance_is_the_same_object_and_compresses() -> None:
    block, x = Block(), input_of(4, 16, 64)
    exact = gradient(block, x)
    assert vramx.compressed_activations(block, **OPTIONS) is block
    found = gradient(block, x)
    assert 0 < relative_error(found, exact) < 0.05
    assert packed(block) > 0


def test_a_class_compresses_every_instance_and_no_subclass_that_does_not_call_super() -> None:
    @vramx.compressed_activations(**OPTIONS)
    class Wrapped(Plain):
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return super().forward(x.tanh(), scale)

    class Calls(Wrapped):
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return super().forward(x, scale).sigmoid()

    class Replaces(Wrapped):
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return self.layer(x)

    x = input_of(8, 64)
    Wrapped()(x)
    assert packed(Wrapped) == 2
    Calls()(x)
    assert packed(Wrapped) == 4
    Replaces()(x)
    assert packed(Wrapped) == 4
    Plain()(x)
    assert packed(Wrapped) == 4


def test_bare_and_configured_forms() -> None:
    @vramx.compressed_activations
    class Bare(Plain):
        pass

    @vramx.compressed_activations(level=vramx.Compression(level="int4"))
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    @vramx.compressed_activations(level="int4", min_bytes=0)
    def configured(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    configured(input_of(64, 64))
    assert packed(configured) == 1
    assert vramx.compression_stats(Bare).tensors == vramx.compression_stats(function).tensors == 0


def test_a_bound_method_is_wrapped_and_its_object_is_not() -> None:
    module = Plain()
    method = vramx.compressed_activations(module.forward, **OPTIONS)
    method(input_of(8, 64))
    assert packed(method) == 1
    assert "forward" not in vars(module)


def test_an_instance_is_restored_however_often_it_was_compressed() -> None:
    module, x = Plain(), input_of(8, 64)
    before = dict(vars(module))
    vramx.compressed_activations(module, **OPTIONS)
    vramx.compressed_activations(module, min_bytes=0, level="int4")
    module(x)
    assert vramx.compression_stats(module).packed.kept_bytes < 0.6 * x.numel()  # the later options
    assert len(vramx.restore(module)) == 1
    assert vars(module) == before
    assert type(module) is Plain
    assert not any(p._backward_hooks for p in module.parameters())


def test_a_class_is_restored() -> None:
    class Own(Plain):
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return x

    class Inherits(Plain):
        pass

    own = Own.forward
    for target in (Own, Inherits):
        vramx.compressed_activations(vramx.compressed_activations(target), level="int4")
        assert len(vramx.restore(target)) == 1
    assert Own.forward is own
    assert "forward" not in vars(Inherits)


def test_a_function_is_restored() -> None:
    function = vramx.compressed_activations(torch.tanh, **OPTIONS)
    function(input_of(8, 64))
    counts = vramx.compression_stats(function)
    assert vramx.compressed_activations(function, level="int4") is function
    assert len(vramx.restore(function)) == 1
    function(input_of(8, 64))
    assert counts.packed.tensors == 1
    assert len(vramx.restore(function)) == 0


def test_what_others_see_of_a_module_does_not_change() -> None:
    plain, module = Plain(), Plain()
    module.load_state_dict(plain.state_dict())
    vramx.compressed_activations(module, **OPTIONS)
    assert isinstance(module, Plain)
    assert (type(module).__name__, type(module).__module__) == ("Plain", Plain.__module__)
    assert repr(module) == repr(plain)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in module.named_modules()] == [n for n, _ in plain.named_modules()]
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert (module.forward.__name__, module.forward.__doc__) == ("forward", "Scale.")
    assert module.forward.__self__ is module


def test_counts_sum_over_calls_until_they_are_reset() -> None:
    module, x = vramx.compressed_activations(Plain(), **OPTIONS), input_of(8, 64)
    module(x), module(x)
    stats = vramx.compression_stats(module)
    assert stats.packed.tensors == 2
    stats.reset()
    module(x)
    assert stats.packed.tensors == 1


@pytest.mark.parametrize(
    ("ask", "target", "words"),
    [
        *(
            (vramx.compressed_activations, x, "accepted are a Module")
            for x in (3, int, "forward", None)
        ),
        *((vramx.compress, x, "accepted is `with vramx.compress") for x in (nn.Tanh(), len)),
        (vramx.compress(), len, "as a decorator of .* vramx.compressed_activations"),
        *((vramx.compression_stats, x, "not compressed") for x in (nn.Tanh(), nn.Linear, len, 3)),
    ],
)
def test_anything_else_is_refused(ask: Any, target: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        ask(target)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compresed_activations", r"\(did you mean 'compressed_activations'\?\)"),
        ("nothing_alike", "'nothing_alike'$"),
        ("__compress__", "'__compress__'$"),
    ],
)
def test_a_misspelt_name_is_told_the_one_that_is_meant(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(vramx, name)


@pytest.mark.parametrize("how", ["instance", "class"])
def test_a_module_packs_while_it_is_training(how: str) -> None:
    class Own(Block):
        pass

    module, x = Own(), input_of(4, 16, 64)
    exact = gradient(module.eval(), x)
    target = vramx.compressed_activations(module if how == "instance" else Own, min_bytes=0)
    assert torch.equal(gradient(module, x), exact)
    assert vramx.compression_stats(target).tensors == 0
    gradient(module.train(), x)
    assert vramx.compression_stats(target).packed.tensors > 0


def test_in_eval_an_enclosing_context_still_packs() -> None:
    module = vramx.compressed_activations(Block().eval(), min_bytes=0)
    context = vramx.compress(min_bytes=0)
    gradient(module, input_of(4, 16, 64), context)
    assert context.stats.packed.tensors > 0


def test_a_report_says_why_where_nothing_is_packed() -> None:
    layer = vramx.compressed_activations(nn.Linear(8, 8).double(), min_bytes=0)
    layer(torch.ones(4, 8, dtype=torch.double, requires_grad=True) * 2)
    (row,) = vramx.report(layer).rows
    assert row.effect == "saved 256 B -> 256 B (1.00x); kept: dtype 256 B"
