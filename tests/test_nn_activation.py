"""Activation functions that keep a packed input, alone and with the Linear that follows.

Kernels are in test_nn_elementwise_kernels.py, derivatives in test_nn_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nn_elementwise_tools import gradients, leaves, sample, saved_by, step_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

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
