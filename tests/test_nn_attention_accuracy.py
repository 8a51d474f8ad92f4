"""Gradients of attention where keys have a constant, and where attention is sharp."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from norm_tools import sample
from test_nn_attention import (
    CALLS,
    HEADS,
    KEY_HEADS,
    SIZE,
    TOKENS,
    attend,
    incoming,
    inputs,
    torchs,
)
from torch import Tensor

from vramx.compression.codec import codec
from vramx.compression.config import Format
from vramx.nn import attention_kernels as kernels
from vramx.nn import operators_attention

KEY_BIAS = 100.0  # deviations of the keys


COSINE = 0.999


# Not of floats, which are constants on keys of their own.
every_other_call = pytest.mark.parametrize("name", [name for name in CALLS if name != "floats"])


def worst_cosine_under_a_bias(**call: Any) -> float:
    """Return the least cosine of dq, dk and dv, of keys with one large constant in each channel."""
    q, k, v = inputs()
    bias = sample(1, KEY_HEADS, 1, SIZE, seed=7).detach()
    tensors = [q, (k.detach() + KEY_BIAS * bias).requires_grad_(), v]
    wide, dy = [x.detach().double().requires_grad_() for x in tensors], incoming()
    exact = torch.autograd.grad(torchs(*wide, **call), wide, dy.double())
    draws = [torch.autograd.grad(attend(*tensors, **call).y, tensors, dy) for _ in range(3)]
    return min(
        sum(float(functional.cosine_similarity(g.double().flatten(), e.flatten(), 0)) for g in gs)
        / len(draws)
        for e, *gs in zip(exact, *draws, strict=True)
    )


@every_other_call
def test_a_constant_on_all_keys_does_not_reach_the_gradients(name: str) -> None:
    assert worst_cosine_under_a_bias(**CALLS[name]) >= COSINE


def packed_result(call: Any, decoded: Any, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return what backward would have if it took a packed result: another than that of its v."""
    y, *state = kernels.forward(call, decoded, mask)
    flat = y.transpose(1, 2).reshape(-1)
    decoded_y = codec.unpack(codec.pack(flat, Format())).view_as(y.transpose(1, 2))
    return decoded_y.transpose(1, 2), *state


def worst_cosine_where_sharp(sharpness: float, **call: Any) -> float:
    """Return the least cosine of dq and dk where next to all of a row's weight is on one key."""
    q, k, v = inputs(key_heads=HEADS)
    q = (sharpness * k.detach()[:, :, :TOKENS]).requires_grad_()
    dy = incoming()
    found = torch.autograd.grad(attend(q, k, v, **call).y, (q, k), dy)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(torchs(*wide, **call), wide[:2], dy.double())
    return min(
        float(functional.cosine_similarity(a.double().flatten(), b.flatten(), 0))
        for a, b in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize("name", ["plain", "causal", "keys only"])
@pytest.mark.parametrize("sharpness", [1.0, 3.0, 6.0])
def test_gradients_are_right_where_attention_is_sharp(sharpness: float, name: str) -> None:
    """There dS is next to nothing, and so must its error be."""
    assert worst_cosine_where_sharp(sharpness, **CALLS[name]) >= COSINE


def worst_share_of_a_constant(**call: Any) -> float:
    """Return what dk sums to over tokens, which is zero, as a share of its sizes' sum."""
    tensors, dy = inputs(), incoming()
    _, dk, _ = torch.autograd.grad(attend(*tensors, **call).y, tensors, dy)
    return float((dk.sum(2).abs() / dk.abs().sum(2)).max())


@every_other_call
def test_what_all_tokens_have_in_common_has_no_gradient_through_the_keys(name: str) -> None:
    """A channel that is constant and large would bring what is left into the weights of keys."""
    # Of at most 24 terms, each off by half a unit of float32 of the largest partial sum. What is
    # packed is drawn: in one draw of 200 the terms of one dk nearly cancel, and are off by more.
    draws = [worst_share_of_a_constant(**CALLS[name]) for _ in range(5)]
    assert statistics.median(draws) <= 24 * 2**-24


DEFECTIVE = {
    # dq gets the mean key times what is missing in rowsum(dy y).
    "bias": lambda: worst_cosine_under_a_bias() < COSINE,
    "sharp": lambda: worst_cosine_where_sharp(6.0) < COSINE,
    "sum": lambda: worst_share_of_a_constant() > 1e-3,
}


@pytest.mark.parametrize("name", DEFECTIVE)
def test_a_packed_result_is_found(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(operators_attention, "_result_again", packed_result)
    assert DEFECTIVE[name]()
