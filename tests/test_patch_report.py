"""vramx.report, the counts of a model, and restoring classes and functions."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from patch_tools import OPTIONS, Plain, Wrapper, inputs, model, pack, recompute, train
from torch import nn

import vramx
from vramx.errors import InvalidValueError


def test_counts_of_a_model_are_of_all_that_is_packed_in_it() -> None:
    net = model()
    pack(net)
    train(net)
    parts = [vramx.compression_stats(block) for block in net]
    whole = vramx.compression_stats(Wrapper(net))
    assert whole.packed.tensors == sum(part.packed.tensors for part in parts) > 0
    assert whole.saved_bytes == sum(part.saved_bytes for part in parts)
    assert set(whole.operations) == {name for part in parts for name in part.operations}


def test_report_says_what_each_module_does() -> None:
    net = model()
    assert str(vramx.report(net)) == f"{len(list(net.modules()))} modules, none of them changed"
    vramx.optimize(net, "int8")
    vramx.compressed_activations(net[0], **OPTIONS)
    recompute(net)
    vramx.compressed_activations(net, level="int4")
    train(net)
    rows = {row.name: row for row in vramx.report(net).rows}
    assert {name: row.done for name, row in rows.items()} == {
        "": "packed in int4",
        "0": "packed in int8; recomputed, input in int8",
        "1": "fused, int8, as EncoderLayer; recomputed, input in int8",
    }
    assert vramx.report(net).unchanged == len(list(net.modules())) - 3


def test_equal_rows_of_a_report_are_one_line() -> None:
    net = nn.Sequential(*(Plain() for _ in range(3)))
    recompute(net)
    assert "\n3        *     Plain  recomputed, input in int8" in str(vramx.report(net))


def test_class_that_was_decorated_is_named_and_not_undone_for_one_model() -> None:
    @vramx.compressed_activations(**OPTIONS)
    class Decorated(Plain):
        pass

    net = nn.Sequential(Decorated(), Plain())
    (row,) = vramx.report(net).rows
    assert row.done == "packed in int8"
    assert "restore(Decorated)" in row.note
    assert len(vramx.restore(net)) == 0
    assert len(vramx.report(net)) == 1
    assert len(vramx.restore(Decorated)) == 1
    assert len(vramx.report(net)) == 0


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args) + 0

    return around


@pytest.mark.parametrize(
    "over",
    [
        decorated,
        functools.partial,
        functools.lru_cache,
        lambda function: types.MethodType(lambda _, x: function(x), 0),
    ],
    ids=["wraps", "partial", "lru_cache", "unknown"],
)
def test_function_is_restored_below_decorators(over: Any, request: Any) -> None:
    @vramx.compressed_activations(**OPTIONS)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    outer, counts = over(function), vramx.compression_stats(function)
    if "unknown" in request.node.name:
        assert len(vramx.restore(outer)) == 0
        assert len(vramx.restore(function)) == 1
    else:
        assert len(vramx.report(outer)) == len(vramx.restore(outer)) == 1
    outer(inputs().requires_grad_())
    assert counts.tensors == 0
    assert len(vramx.report(function)) == 0


@pytest.mark.parametrize("target", [3, "model", int, [nn.Linear(2, 2)]])
@pytest.mark.parametrize("ask", [vramx.restore, vramx.report])
def test_anything_else_is_refused(ask: Any, target: Any) -> None:
    with pytest.raises(InvalidValueError, match="accepted are a Module, a class of Modules"):
        ask(target)
