"""The feed-forward part that backward computes again: results, gradients, and what is kept.

Derivatives are in test_nn_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from interpreted_nn import interpreted_nn
from nn_elementwise_tools import differs
from norm_tools import EXACT, INT4, INT8, NEAREST, gradients, sample, step_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import vramx
from vramx.compression.config import Compression
from vramx.nn import operators_mlp, products
from vramx.nn.functional import mlp, rms_norm
from vramx.nn.optimize import optimize

INPUTS, INNER = 128, 96
every_form = pytest.mark.parametrize("count", [2, 3], ids=["plain", "gated"])


def parameters(
    count: int, inputs: int = INPUTS, inner: int = INNER, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights that keep the size of what goes through them, and a bias for the first."""
    shapes = [*[(inner, inputs)] * (count - 1), (inputs, inner)]
    weights = [
        (sample(*s, seed=9 + i, dtype=dtype) / s[1] ** 0.5).detach().requires_grad_()
        for i, s in enumerate(shapes)
    ]
    return weights, [sample(inner, seed=7, dtype=dtype), *[None] * (count - 1)]


def plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Return what mlp() does, with silu where there is a gate and gelu where there is none."""
    first, *up = (F.linear(x, w, b) for w, b in zip(weights[:-1], biases, strict=False))
    return F.linear(F.silu(first) * up[0] if up else F.gelu(first), weights[-1], biases[-1])


def fused(
    x: Any, weights: Sequence[Tensor], biases: Sequence[Tensor | None], **options: Any
) -> Tensor:
    return mlp(x, weights, biases, activation="silu" if len(weights) == 3 else "gelu", **options)


def check_derivatives(ours: Any, theirs: Any, every: list[Tensor]) -> None:
    """Sums are of at most 128 terms of order 10, in two products; float64 has 2**-53."""
    assert torch.allclose(*ours(), *theirs(), rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(ours, every), gradients(theirs, every), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)


def backward_arguments(count: int) -> tuple[Any, ...]:
    """Return arguments of mlp_backward whose pack is of a norm with a weight; all is asked for."""
    spec, x = [8, 64, 1, 0], sample(5, 64).detach()
    weights, biases = parameters(count, 64, 24)
    buffer, _ = torch.ops.vramx.keep(x, spec)
    detached = [w.detach() for w in weights], [torch.empty(0) if b is None else b.detach()
                                               for b in biases]  # fmt: skip
    kind = "silu" if count == 3 else "gelu"
    needs = [True, *[True] * count, *[b is not None for b in biases]]
    scale = sample(64, seed=2).detach()
    incoming = sample(5, 64, seed=4).detach()
    return incoming, *detached, kind, buffer, scale, None, x.dtype, spec, needs


@every_form
def test_kernel_is_the_composite(count: int) -> None:
    incoming, weights, biases, kind, *_ = backward_arguments(count)
    kept = (*[incoming] * 2, None, None, None, 0.0, False, torch.float32, [-1, 0, 0, 0])
    forward = (incoming, weights, biases, incoming, kind, *kept)
    assert (
        differs(interpreted_nn().operator("mlp", *forward)[0], torch.ops.vramx.mlp(*forward)) <= 1
    )


DEFECTS = {2: "slope of the activation", 3: "slope without its second term"}


@every_form
def test_kernel_of_backward_is_the_composite(count: int) -> None:
    arguments = backward_arguments(count)
    expected = torch.ops.vramx.mlp_backward(*arguments)

    def worst(**options: Any) -> float:
        found = interpreted_nn().operator("mlp_backward", *arguments, **options)
        pairs = [pair for pair in zip(found, expected, strict=True) if pair[1].numel()]
        assert len(pairs) == 1 + count + 1
        return max(differs(*pair) for pair in pairs)

    assert worst() <= 1
    assert worst(defect=DEFECTS[count]) > 1


@pytest.mark.parametrize("rows", [4, products._TILE_ROWS])
def test_frozen_weights_get_no_gradient(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_TILE_ROWS", rows)
    x, (weights, biases) = sample(13, INPUTS), parameters(3)
    exact = torch.autograd.grad(plain(x, weights, biases).sum(), [x, weights[1]])
    frozen = [weights[0].detach(), weights[1], weights[2].detach()]
    found = torch.autograd.grad(fused(x, frozen, biases, keep=EXACT).sum(), [x, weights[1]])
    for a, b in zip(found, exact, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)  # of sums of 13 terms of order 10


def test_nothing_is_packed_without_gradients() -> None:
    x, (weights, biases) = sample(32, INPUTS), parameters(3)
    with torch.no_grad():
        normed = rms_norm(x)
        assert torch.allclose(fused(normed, weights, biases), plain(normed.y, weights, biases))
    # What was made without grad mode has no pack: one is made.
    found = torch.autograd.grad(fused(normed, weights, biases).sum(), weights)
    exact = torch.autograd.grad(plain(normed.y, weights, biases).sum(), weights)
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()


def test_autocast_computes_in_its_type() -> None:
    x, (weights, biases) = sample(32, INPUTS), parameters(3)

    def call() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [fused(rms_norm(x), weights, biases, residual=x)]

    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(rms_norm(x).y, weights, biases)
    assert call()[0].dtype == torch.float32
    # Torch rounds gate, silu(gate) and the product; ours the product: a few halves of 2**-8.
    off = call()[0] - x - expected
    assert off.norm() <= 2**-7 * expected.norm()
    assert {g.dtype for g in gradients(call, [x, *weights, biases[0]])} == {torch.float32}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_TILE_ROWS", 4)


@pytest.mark.parametrize("count", [1, 8191, 16_383, 16_384, 100_000, 131_072, 1_000_001])
def test_tiles_are_all_rows_in_order(count: int) -> None:
    tiles = products.tiles(count)
    assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
    assert tiles[-1].stop == count
    assert len(tiles) <= 16
    assert len(tiles) == 1 or min(t.stop - t.start for t in tiles[:-1]) >= 8192


@every_form
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.usefixtures("small_tiles")
def test_derivatives_of_many_rows_are_torchs(count: int, with_residual: bool) -> None:
    x = sample(3, 7, INPUTS, dtype=torch.float64)
    weights, biases = parameters(count, dtype=torch.float64)
    biases[-1] = sample(INPUTS, seed=4, dtype=torch.float64)
    weights[0] = weights[0].detach().t().contiguous().t().requires_grad_()
    residual = sample(3, 7, INPUTS, seed=8, dtype=torch.float64) if with_residual else None
    every = [x, *weights, *(b for b in (*biases, residual) if b is not None)]

    def ours() -> list[Tensor]:
        return [fused(x, weights, biases, residual=residual, keep=EXACT)]

    def theirs() -> list[Tensor]:
        return [plain(x, weights, biases) + (0 if residual is None else residual)]

    check_derivatives(ours, theirs, every)
    for a, b in zip(gradients(ours, every), gradients(theirs, every), strict=True):
        assert a.stride() == b.stride()


@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_wider_weights_are_summed_in_their_type() -> None:
    """Each part's product is in bfloat16, as torch's is under autocast; their sum is not."""
    x, (weights, biases) = sample(64, INPUTS), parameters(3)

    def step() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [fused(x, weights, biases, keep=EXACT)]

    found = gradients(step, weights)
    assert all(each.dtype == torch.float32 for each in found)
    assert any((each != each.bfloat16().float()).any() for each in found)


def test_a_recomputed_block_of_many_tokens_holds_its_inside_for_one_tile(monkeypatch: Any) -> None:
    """Of 65,536 tokens, 8 tiles: seven eighths of two wide tensors are not there at once."""
    tokens, width, wide = 65_536, 64, 1024

    def peak() -> int:
        with torch.device("meta"):
            layer = torch.nn.TransformerEncoderLayer(
                width, 2, wide, activation="gelu", dropout=0.0, batch_first=True, norm_first=True
            )
            x = torch.empty(16, tokens // 16, width)
        optimize(layer, "recompute_all")

        def step() -> None:
            layer(x).sum().backward()

        return vramx.predict(step, policies="live").peak_bytes()

    tiled = peak()
    monkeypatch.setattr(products, "_TILE_ROWS", tokens)
    assert peak() - tiled >= 7 / 8 * 2 * tokens * wide * 4


# -- How far gradients are off where a pack of the input is kept -----------------------------------


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
    inputs, rows = 16, 32
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
