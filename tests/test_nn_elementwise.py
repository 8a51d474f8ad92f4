"""Activations, gated units and dropout: results, gradients, and what they keep.

Kernels are in test_nn_elementwise_kernels.py, derivatives in test_nn_derivatives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_elementwise_tools import differs, gradients, leaves, sample
from norm_tools import EXACT, NEAREST, step_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from vramx.compression.hooks import compress
from vramx.nn.activation import gelu, silu
from vramx.nn.dropout import dropout, dropout_add
from vramx.nn.glu import swiglu
from vramx.nn.unit_linear import gelu_linear, glu_linear


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


@pytest.mark.parametrize(
    ("function", "plain", "curvature"), [(gelu, F.gelu, 0.8), (silu, F.silu, 0.5)]
)
def test_gradient_of_int8_is_within_the_codecs_bound(
    function: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], curvature: float
) -> None:
    x, incoming = sample(64, 256), sample(64, 256, seed=2)
    (found,) = gradients(function, [x], incoming)
    (exact,) = gradients(plain, [x.double()], incoming.double())
    bound = incoming.double().abs() * curvature * step_of(x)
    assert ((found - exact).abs() <= bound * 1.001 + 1e-6).all()


def test_gradients_of_gates_in_int8_are_within_the_codecs_bound() -> None:
    """With |silu'| <= 1.1 and |silu''| <= 0.5; the last factor is for float32's rounding."""
    gate, up, incoming = sample(64, 256), sample(64, 256, seed=1), sample(64, 256, seed=2)
    dgate, dup = gradients(swiglu, [gate, up], incoming)
    exact = gradients(plain_swiglu, [gate.double(), up.double()], incoming.double())
    size, of_gate, of_up = incoming.double().abs(), step_of(gate), step_of(up)
    bound_of_dup = size * 1.1 * of_gate
    bound_of_dgate = size * (1.1 * of_up + 0.5 * of_gate * (up.double().abs() + of_up))
    assert ((dup - exact[1]).abs() <= bound_of_dup * 1.001 + 1e-6).all()
    assert ((dgate - exact[0]).abs() <= bound_of_dgate * 1.001 + 1e-6).all()


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


def test_elements_that_are_not_finite_give_nan_gradients() -> None:
    gate, up = sample(2, 128), sample(2, 128, seed=1)
    gate[0, 3] = torch.inf
    _, dup = gradients(swiglu, [gate, up], torch.ones(2, 128))
    assert dup.isnan().nonzero().tolist() == [[0, 3]]


# -- Dropout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2.0**-16, 0.1, 0.5, 0.9])
def test_share_that_is_dropped_is_p(p: float) -> None:
    """Within 5 standard deviations of a binomial, passed with probability 1 - 6e-7."""
    torch.manual_seed(1)
    n = 1 << 18
    dropped = int((dropout(torch.ones(n), p) == 0).sum())
    spread = 5 * math.sqrt(n * p * (1 - p)) + 1

    def fits(count: float) -> bool:
        return abs(count - n * p) <= spread

    assert fits(dropped)
    assert not fits(n * (p + 0.01))  # what a share that is off by a hundredth gives


def test_neighbours_are_dropped_independently() -> None:
    """The correlation at lag 1 to 8, within 5 / sqrt(n); repeating every 8th element fails."""
    torch.manual_seed(2)
    n = 1 << 18
    flags = (dropout(torch.ones(n), 0.5) > 0).double() * 2 - 1

    def independent(flags: Tensor) -> bool:
        lags = range(1, 9)
        return all(abs(float((flags[lag:] * flags[:-lag]).mean())) < 5 / n**0.5 for lag in lags)

    assert independent(flags)
    assert not independent(flags[:8].repeat(n // 8))


@pytest.mark.parametrize("adds", [False, True])
def test_gradient_passes_where_the_element_did(adds: bool) -> None:
    x, residual = leaves(torch.ones(5, 77), torch.zeros(5, 77))
    y = dropout_add(x, residual, 0.5) if adds else dropout(x, 0.5)
    y.backward(incoming := sample(5, 77))
    assert torch.equal(x.grad, y.detach() * incoming)
    if adds:
        assert torch.equal(residual.grad, incoming)


def test_torchs_seed_decides_and_calls_differ() -> None:
    x = torch.ones(1000)
    torch.manual_seed(5)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(5)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_p_of_zero_and_evaluation_draw_nothing() -> None:
    x = sample(10)
    before = torch.get_rng_state()
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x
    assert torch.equal(dropout_add(x, x, 0.5, training=False), x + x)
    assert torch.equal(torch.get_rng_state(), before)


def test_p_of_one_drops_everything() -> None:
    (x,) = leaves(torch.tensor([1.0, torch.inf]))
    y = dropout(x, 1.0)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2))
    assert torch.equal(x.grad, torch.zeros(2))


def test_compiled_calls_of_one_graph_differ() -> None:
    compiled = torch.compile(
        lambda x: (dropout(x, 0.5), dropout(x, 0.5)), fullgraph=True, backend="aot_eager"
    )
    (x,) = leaves(torch.ones(1000))
    first, second = compiled(x)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())
