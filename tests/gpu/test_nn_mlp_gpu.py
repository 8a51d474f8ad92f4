"""The recomputed feed-forward part on a GPU: its kernels in place, and the memory of its backward.

The formulas are compared on the host (tests/test_nn_mlp.py); here is what only a GPU shows.
"""

from __future__ import annotations

import pytest
import torch
from norm_tools import EXACT, INT8_STEP, held_bytes
from optimize_tools import error
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import vramx
from vramx.nn import products
from vramx.nn.functional import mlp, rms_norm

pytestmark = pytest.mark.gpu

HIDDEN, INNER, ROWS = 512, 1536, 1024
every_form = pytest.mark.parametrize("count", [2, 3], ids=["plain", "gated"])


@pytest.fixture(params=[1, 4], ids=["at_once", "in_tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return in how many parts the rows go through."""
    if request.param > 1:
        monkeypatch.setattr(products, "_TILE_ROWS", ROWS // request.param)
    assert len(products.tiles(ROWS)) == request.param
    return int(request.param)


def parameters(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return x, the norm's weight, and weights that keep the size of what goes through them."""
    generator = torch.Generator("cuda").manual_seed(count)

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, device="cuda", generator=generator) / (shape[-1] ** 0.5)
        return x.to(dtype).requires_grad_()

    x = torch.randn(ROWS, HIDDEN, device="cuda", generator=generator).to(dtype).requires_grad_()
    inner = [leaf(INNER, HIDDEN) for _ in range(count - 1)]
    return x, torch.ones_like(x[0]).detach().requires_grad_(), [*inner, leaf(HIDDEN, INNER)]


def plain(x: Tensor, scale: Tensor, weights: list[Tensor]) -> Tensor:
    y = F.rms_norm(x, (HIDDEN,), scale, 1e-5)
    first, *up = (F.linear(y, weight) for weight in weights[:-1])
    return F.linear(F.silu(first) * up[0] if up else F.gelu(first), weights[-1]) + x


def fused(x: Tensor, scale: Tensor, weights: list[Tensor], keep: object = None) -> Tensor:
    kind = "silu" if len(weights) == 3 else "gelu"
    normed = rms_norm(x, scale, 1e-5, keep=keep)
    return mlp(normed, weights, activation=kind, residual=x)


@every_form
@pytest.mark.parametrize("packed", [False, True], ids=["exact", "int8"])
@pytest.mark.usefixtures("tiles")
def test_gradients_are_no_further_from_float64_than_torchs(count: int, packed: bool) -> None:
    """An int8 element is off by half a step in the root mean square, in groups whose largest is
    below 5 deviations, and a gradient has the error of two such factors."""
    vramx.manual_seed(0, rank=0)
    x, scale, weights = parameters(count, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (x, scale, *weights)]
    incoming = torch.randn(ROWS, HIDDEN, device="cuda")
    exact_y = plain(wide[0], wide[1], wide[2:])
    exact = torch.autograd.grad(exact_y, wide, incoming.double())
    torchs_y = plain(x, scale, weights)
    torchs = torch.autograd.grad(torchs_y, [x, scale, *weights], incoming.bfloat16())
    y = fused(x, scale, weights, None if packed else EXACT)
    found = torch.autograd.grad(y, [x, scale, *weights], incoming.bfloat16())
    assert error(y, exact_y.detach()) <= 2 * error(torchs_y, exact_y.detach())
    codec = INT8_STEP * 5 / 2 * 2 if packed else 0.0
    for a, b, c in zip(found, torchs, exact, strict=True):
        assert error(a, c) <= 2 * error(b, c) + codec


@every_form
def test_backward_takes_three_inner_tensors_of_a_tile_at_most(count: int, tiles: int) -> None:
    """gate, up and their product's gradient; x, and its gradient twice; the weights' gradients."""
    x, scale, weights = parameters(count, torch.bfloat16)
    apart = [x, scale, *weights]
    held = held_bytes(lambda: fused(x, scale, weights), *apart) / x.numel()
    # The norm's pack: a code an element, a scale and two outliers a group; and a float32 a row.
    assert held == pytest.approx(1 + 6 / 128 + 4 / HIDDEN, rel=1e-3)
    for _ in range(2):
        y = fused(x, scale, weights)
        gradient = torch.ones_like(y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(y, apart, gradient)
        peak = torch.cuda.max_memory_allocated() - before
    inner, outer = ROWS * INNER * 2, ROWS * HIDDEN * 2
    of_weights = sum(weight.numel() * 2 for weight in weights)
    assert peak <= count * inner / tiles + 3 * outer + of_weights + 2**20
