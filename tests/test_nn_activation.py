"""Activation functions that keep a packed input, alone and with the Linear that follows.

Kernels are in test_nn_elementwise_kernels.py, derivatives in test_nn_derivatives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from nn_elementwise_tools import (
    EXACT,
    gradients,
    leaves,
    relative_error,
    sample,
    saved_by,
    step_of,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from vramx.compression.config import Compression
from vramx.nn.activation import gelu, silu
from vramx.nn.relu import relu
from vramx.nn.unit_linear import gelu_linear


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


def test_gradient_of_int8_is_unbiased() -> None:
    """Of the mean over N draws, beyond the second order of the step: |gelu'''| s**2 / 8 an element.

    Each draw is off by less than 0.8 s |dy| and their mean, if unbiased, by a normal error of at
    most 0.8 s / 2 / sqrt(N); over 4096 elements 6 standard deviations are passed with p < 1e-5.
    Rounding to nearest, which repeats one error N times, must not pass.
    """
    draws, x = 256, sample(4096)
    incoming = torch.ones_like(x)
    (exact,) = gradients(F.gelu, [x.double()], incoming.double())
    step = step_of(x)
    bound = 0.8 * step / 2 * 6 / math.sqrt(draws) + 2 * step**2 / 8 + 1e-6

    def passes(keep: Compression) -> bool:
        total = torch.zeros_like(exact)
        for _ in range(draws):
            total += gradients(lambda x: gelu(x, keep=keep), [x], incoming)[0]
        return bool(((total / draws - exact).abs() <= bound).all())

    assert passes(Compression())
    assert not passes(Compression(rounding="nearest"))


def test_bfloat16_is_as_near_to_float64_as_torch_is() -> None:
    shapes, dtype = [(64, 128), (32, 128), (32,)], torch.bfloat16
    inputs = [sample(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    incoming = sample(64, 32, seed=9, dtype=dtype)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.gelu(x), weight, bias)

    exact = gradients(plain, [tensor.double() for tensor in inputs], incoming.double())
    torchs = gradients(plain, inputs, incoming)
    found = gradients(lambda *t: gelu_linear(*t, keep=EXACT), inputs, incoming)
    for a, b, c in zip(found, torchs, exact, strict=True):
        assert relative_error(a, c) <= 2 * relative_error(b, c)


def test_only_packs_are_kept() -> None:
    x, weight = leaves(sample(64, 256), sample(8, 256, seed=1))
    calls: list[tuple[Callable[..., Tensor], list[Tensor], float]] = [
        (gelu, [x], 1 + 6 / 128),
        (gelu_linear, [x, weight], 1 + 6 / 128),
        (relu, [x], 1 / 8),
    ]
    for function, inputs, kept in calls:
        saved = saved_by(function, inputs)
        assert [tensor.dtype for tensor in saved] == [torch.uint8]
        assert saved[0].numel() == kept * x.numel()
