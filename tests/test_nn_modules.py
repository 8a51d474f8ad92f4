"""Modules of vramx.nn: they are the functions, with torch's arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from norm_tools import INT4, sample
from torch import nn

from vramx import nn as vnn


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (vnn.GELU(), nn.GELU()),
        (vnn.GELU("tanh"), nn.GELU("tanh")),
        (vnn.SiLU(), nn.SiLU()),
        (vnn.SiLU(inplace=True), nn.SiLU(inplace=True)),
        (vnn.ReLU(), nn.ReLU()),
        (vnn.ReLU(inplace=True), nn.ReLU(inplace=True)),
        (vnn.Dropout(0.3).eval(), nn.Dropout(0.3).eval()),
        (vnn.Dropout(0.0), nn.Dropout(0.0)),
    ],
    ids=repr,
)
def test_takes_torchs_place(ours: nn.Module, theirs: nn.Module) -> None:
    x = sample(4, 33).detach()
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert torch.allclose(ours(x.clone()), theirs(x.clone()), atol=1e-6)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (vnn.SwiGLU(), lambda gate, up: functional.silu(gate) * up),
        (vnn.GeGLU(), lambda gate, up: functional.gelu(gate) * up),
        (vnn.GeGLU("tanh"), lambda gate, up: functional.gelu(gate, approximate="tanh") * up),
    ],
    ids=["swiglu", "geglu", "geglu_tanh"],
)
def test_gated_units_are_products(module: nn.Module, function: Any) -> None:
    gate, up = sample(4, 33).detach(), sample(4, 33, seed=1).detach()
    assert torch.allclose(module(gate, up), function(gate, up), atol=1e-6)


def test_loss_is_that_of_the_logits() -> None:
    hidden, weight = sample(7, 8), sample(5, 8, seed=1)
    targets = torch.tensor([0, 1, 2, 3, 4, 1, -1])
    options = {"ignore_index": -1, "label_smoothing": 0.1}
    loss = vnn.LinearCrossEntropy(**options, chunk=3)(hidden, weight, targets)
    expected = nn.CrossEntropyLoss(**options)(hidden @ weight.t(), targets)
    # A mean of 6 terms of order 10; float32 has 2**-24.
    assert torch.allclose(loss, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(vnn.RMSNorm, nn.RMSNorm), (vnn.LayerNorm, nn.LayerNorm)]
)
@pytest.mark.parametrize("shape", [(64,), (4, 64)])
def test_module_takes_torchs_place(ours: Any, theirs: Any, shape: tuple[int, ...]) -> None:
    x, module = sample(3, *shape), theirs(shape)
    nn.init.normal_(module.weight)
    replaced = copy.deepcopy(module)
    replaced.__class__ = ours
    assert torch.allclose(replaced(x), module(x), atol=1e-5)
    fresh = ours(shape)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(x), replaced(x))


def test_module_keeps_as_it_is_told() -> None:
    module = vnn.RMSNorm(64)
    module.keep = INT4
    x, residual = sample(3, 64), sample(3, 64, seed=1)
    done = module.normed(x, residual)
    assert done.kept.spec.bits == 4
    assert torch.equal(done.residual_sum, x + residual)
