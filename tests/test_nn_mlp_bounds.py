"""How far gradients of the feed-forward part are off that keeps a pack of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from norm_tools import INT4, INT8, NEAREST, sample, step_of
from test_nn_mlp import every_form, fused, parameters, plain
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from vramx.compression.config import Compression
from vramx.nn import operators_mlp
from vramx.nn.functional import rms_norm


class Bounds:
    """How far gradients may be from the exact ones if the input is off by `step`.

    With first and second derivatives of silu below 1.1 and 0.5, of gelu below 1.13 and 0.8. There
    is no residual, and no bias.
    """

    def __init__(self, x: Tensor, step: Tensor, weights: Sequence[Tensor], incoming: Tensor):
        x, incoming, *weights = (t.detach().double() for t in (x, incoming, *weights))
        self._x, self._step, self._inner = x, step, weights[:-1]
        dz = (incoming @ weights[-1]).abs()
        inside = [x @ w.t() for w in weights[:-1]]
        off = [step @ w.abs().t() for w in weights[:-1]]
        if len(inside) == 1:
            value, slopes, slopes_off = 1.13 * off[0], [1.13 * dz], [0.8 * dz * off[0]]
        else:
            up = inside[1].abs() + off[1]
            value = 1.1 * off[0] * up + F.silu(inside[0]).abs() * off[1]
            slopes = [1.1 * dz * up, dz * F.silu(inside[0]).abs()]
            slopes_off = [dz * (1.1 * off[1] + 0.5 * off[0] * up), 1.1 * dz * off[0]]
        self._slopes, self._slopes_off = slopes, slopes_off
        self.last = incoming.abs().t() @ value

    def of_weights(self) -> list[Tensor]:
        size = self._x.abs() + self._step
        pairs = zip(self._slopes, self._slopes_off, strict=True)
        return [*(off.t() @ size + slope.t() @ self._step for slope, off in pairs), self.last]

    def of_input(self) -> Tensor:
        products = zip(self._slopes_off, self._inner, strict=True)
        return sum((off @ w.abs() for off, w in products), torch.zeros(()))


def excess(
    count: int, keep: Compression, source: str = "tensor", seed: int = 0
) -> tuple[Tensor, ...]:
    """Return by how much gradients leave their bounds: of the weights, and of the input.

    Few inputs, that the bounds, which add up magnitudes, are not wide; float32's rounding of sums
    of at most 32 terms of order 1 has 1e-5.
    """
    inputs, rows = 8, 32
    x, scale = sample(rows, inputs, seed=seed), sample(inputs, seed=5)
    weights, _ = parameters(count, inputs, 4)
    incoming = sample(rows, inputs, seed=8).detach()
    none = [None] * count
    normed: Any = rms_norm(x, scale, 1e-5, keep=keep) if source == "norm" else x
    y = normed.y if source == "norm" else x
    exact = torch.autograd.grad(plain(y, weights, none), [y, *weights], incoming)
    result = fused(normed, weights, none, keep=keep)
    found = torch.autograd.grad(result, [y, *weights], incoming)
    step = step_of(x)
    if source == "norm":
        step = step_of(y.detach() / scale.detach()) * scale.detach().double().abs()
    bounds = Bounds(y, step, weights, incoming)
    each = [bounds.of_input(), *bounds.of_weights()]
    return tuple(
        ((a - b).abs() - bound - 1e-5).max() for a, b, bound in zip(found, exact, each, strict=True)
    )


@every_form
@pytest.mark.parametrize("source", ["tensor", "norm"])
@pytest.mark.parametrize("keep", [INT8, NEAREST, INT4], ids=["stochastic", "nearest", "4 bits"])
def test_int8_gradients_are_within_a_step(count: int, source: str, keep: Compression) -> None:
    """And those of 4 bits are not."""
    assert (max(excess(count, keep, source)) <= 0) == (keep is not INT4)


@every_form
def test_bounds_of_a_step_see_a_norm_without_its_weight(count: int, monkeypatch: Any) -> None:
    right = operators_mlp.output_again
    monkeypatch.setattr(
        operators_mlp, "output_again", lambda kept, _, *how: right(kept, (None, None), *how)
    )
    assert max(excess(count, INT8, "norm")) > 0
