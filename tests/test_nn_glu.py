"""Gated linear units that keep packed inputs: results, gradients, and what they keep.

Kernels are in test_nn_elementwise_kernels.py, derivatives in test_nn_derivatives.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_elementwise_tools import (
    EXACT,
    FORMATS,
    differs,
    gradients,
    leaves,
    sample,
    saved_by,
    step_of,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from vramx.compression.config import Compression
from vramx.compression.hooks import compress
from vramx.nn.glu import swiglu
from vramx.nn.unit_linear import gelu_linear, glu_linear

NEAREST = Compression(rounding="nearest")


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("biased", [False, True], ids=["product", "bias"])
def test_residual_is_added(biased: bool) -> None:
    shapes = [(3, 5), (3, 5), (4, 5), (3, 4), (4,)]
    gate, up, weight, residual, bias = (sample(*s, seed=i).double() for i, s in enumerate(shapes))
    behind = weight, bias if biased else None
    options: Any = {"residual": residual, "keep": EXACT}
    for found, inner in (
        (glu_linear(gate, up, *behind, **options), F.silu(gate) * up),
        (gelu_linear(gate, *behind, **options), F.gelu(gate)),
    ):
        expected = F.linear(inner, *behind) + residual
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_residual_of_a_wider_type_gives_the_result_its_type() -> None:
    gate, weight, residual = (sample(*s, dtype=torch.bfloat16) for s in ((8, 16), (4, 16), (8, 4)))
    narrow = glu_linear(gate, gate, weight, residual=residual)
    wide = glu_linear(gate, gate, weight, residual=residual.float())
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    # The sum is rounded once in the one, the product in the other.
    assert differs(narrow.float(), wide, 2.0**-7) <= 1


def test_gradients_of_int8_are_within_the_codecs_bound() -> None:
    """With |silu'| <= 1.1 and |silu''| <= 0.5; the last factor is for float32's rounding."""
    gate, up, incoming = sample(64, 256), sample(64, 256, seed=1), sample(64, 256, seed=2)
    dgate, dup = gradients(swiglu, [gate, up], incoming)
    exact = gradients(plain_swiglu, [gate.double(), up.double()], incoming.double())
    size, of_gate, of_up = incoming.double().abs(), step_of(gate), step_of(up)
    bound_of_dup = size * 1.1 * of_gate
    bound_of_dgate = size * (1.1 * of_up + 0.5 * of_gate * (up.double().abs() + of_up))
    assert ((dup - exact[1]).abs() <= bound_of_dup * 1.001 + 1e-6).all()
    assert ((dgate - exact[0]).abs() <= bound_of_dgate * 1.001 + 1e-6).all()


@pytest.mark.parametrize(("name", "kept"), [("int8", 1 + 6 / 128), ("int4", 0.5 + 4 / 64)])
def test_only_the_two_packs_are_kept(name: str, kept: float) -> None:
    gate, up, weight = leaves(sample(64, 256), sample(64, 256, seed=1), sample(8, 256, seed=2))
    keep = FORMATS[name]
    for saved in (
        saved_by(lambda gate, up: swiglu(gate, up, keep=keep), [gate, up]),
        saved_by(lambda *tensors: glu_linear(*tensors, keep=keep), [gate, up, weight]),
    ):
        assert [tensor.dtype for tensor in saved] == [torch.uint8] * 2
        assert sum(tensor.numel() for tensor in saved) == 2 * kept * gate.numel()


def test_inputs_are_freed_once_they_are_packed() -> None:
    gate, up = leaves(sample(8, 128), sample(8, 128, seed=1))
    inner = gate * 2
    seen = torch.multiprocessing.reductions.StorageWeakRef(inner.untyped_storage())
    result = swiglu(inner, up)
    del inner
    assert seen.expired()
    result.sum().backward()
    assert gate.grad is not None


def test_autocast_casts_as_linear_does() -> None:
    gate, up, weight = leaves(sample(8, 128), sample(8, 128, seed=1), sample(4, 128, seed=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = glu_linear(gate, up, weight)
        expected = F.linear(F.silu(gate) * up, weight)
    assert found.dtype == expected.dtype == torch.bfloat16
    found.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_enclosing_compression_does_not_pack_packs() -> None:
    inputs, incoming = leaves(sample(64, 128), sample(64, 128, seed=1)), sample(64, 128, seed=2)
    with compress(level="int4", min_bytes=1):
        inside = swiglu(*inputs, keep=NEAREST)
    found = torch.autograd.grad(inside, inputs, incoming)
    plain = gradients(lambda g, u: swiglu(g, u, keep=NEAREST), inputs, incoming)
    assert all(map(torch.equal, found, plain))


def test_empty_tensors_pass() -> None:
    gate, up, weight = leaves(torch.zeros(0, 8), torch.zeros(0, 8), torch.ones(4, 8))
    glu_linear(gate, swiglu(gate, up), weight).sum().backward()
    assert gate.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(4, 8))


def test_non_finite_groups_give_nan_gradients() -> None:
    gate, up = sample(2, 128), sample(2, 128, seed=1)
    gate[0, 3] = torch.inf
    _, dup = gradients(swiglu, [gate, up], torch.ones(2, 128))
    assert dup[0].isnan().all()
    assert not dup[1].isnan().any()
