"""Linears that keep their input packed: results, gradients, bytes, autocast.

The input's gradient does not need what is kept and must be torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as functional
from compress_tools import worst_cosine
from norm_tools import (
    EXACT,
    INT4,
    INT8,
    NEAREST,
    gradients,
    norm_of,
    sample,
    step_of,
    torchs_norm,
)
from torch import Tensor

from vramx.compression.codec import random
from vramx.compression.config import Compression
from vramx.nn import Linear, feed_forward, keeping
from vramx.nn import linear as fused_linear
from vramx.nn import reference_norm as reference
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.functional import gelu_linear, linear, linears, rms_norm, silu, swiglu

HIDDEN, OUT = 128, (16, 8, 24)


def parameters(
    dtype: torch.dtype = torch.float32, hidden: int = HIDDEN
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return three weights, and a bias for each but the last."""
    weights = [sample(out, hidden, seed=10 + out, dtype=dtype) for out in OUT]
    biases = [sample(out, seed=20 + out, dtype=dtype) for out in OUT[:2]]
    return weights, [*biases, None]


def plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


def affine_of(kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    vectors = [sample(HIDDEN, seed=seed, dtype=dtype) for seed in (2, 3)]
    return vectors[:1] if kind == "rms" else vectors


every_kind = pytest.mark.parametrize("kind", ["rms", "layer"])


@pytest.mark.parametrize("keep", [None, INT4, EXACT], ids=["int8", "int4", "exact"])
def test_results_of_a_tensor_are_torchs(keep: Compression | None) -> None:
    x, (weights, biases) = sample(3, 5, HIDDEN), parameters()
    assert all(map(torch.equal, linears(x, weights, biases, keep), plain(x, weights, biases)))


def within_a_step(ours: Tensor, exact: Tensor, dout: Tensor, off: Tensor) -> bool:
    """dweight = dout^T y is off by at most |dout|^T times what y is, and float32's rounding."""
    bound = dout.double().abs().t() @ off.double()
    return bool(((ours - exact).abs() <= bound + 1e-4).all())


@pytest.mark.parametrize("keep", [INT8, NEAREST, INT4], ids=["stochastic", "nearest", "4 bits"])
def test_int8_weight_gradient_of_a_tensor_is_within_a_step(keep: Compression) -> None:
    """And that of 4 bits is not."""
    x, weight = sample(32, HIDDEN), sample(OUT[0], HIDDEN, seed=1)
    dout = sample(32, OUT[0], seed=2).detach()
    dx, dweight = torch.autograd.grad(linear(x, weight, keep=keep), [x, weight], dout)
    exact = torch.autograd.grad(functional.linear(x, weight), [x, weight], dout)
    assert torch.equal(dx, exact[0])
    assert within_a_step(dweight, exact[1], dout, step_of(x)) == (keep is not INT4)


@every_kind
def test_int8_weight_gradient_of_a_norm_is_within_a_step(kind: str) -> None:
    """y = n weight + bias, so y is off by |weight| times what n is."""
    x, weight, affine = sample(32, HIDDEN), sample(OUT[0], HIDDEN, seed=1), affine_of(kind)
    dout = sample(32, OUT[0], seed=4).detach()
    (dweight,) = torch.autograd.grad(linear(norm_of(kind, x, affine), weight), [weight], dout)
    (exact,) = torch.autograd.grad(
        functional.linear(torchs_norm(kind, x, affine), weight), [weight], dout
    )
    n, _ = reference.normalise(x.detach(), 1e-5, kind == "layer")
    assert within_a_step(dweight, exact, dout, step_of(n) * affine[0].abs())


def mean_z_squared(keep: Compression, count: int = 200) -> float:
    """Return the mean square of a gradient's mean error in units of its largest deviation.

    One element of x has a variance of at most a quarter of its squared step (codec.py), and the
    gradient of column j adds 8 of them.
    """
    x, weight, dout = sample(8, HIDDEN), sample(1, HIDDEN, seed=1), torch.ones(8, 1)
    (exact,) = torch.autograd.grad(functional.linear(x, weight), [weight], dout)
    random.manual_seed(0)
    draws = [
        torch.autograd.grad(linear(x, weight, keep=keep), [weight], dout)[0] for _ in range(count)
    ]
    errors = torch.stack(draws).double() - exact
    variance = step_of(x).square().sum(0) / 4
    return float((errors.mean(0).square() / (variance / count)).mean())


def test_stochastic_weight_gradients_are_unbiased() -> None:
    """Of 128 columns; the mean of z**2 is at most 1, with a deviation of sqrt(2 / 128) = 0.125.

    Rounding to nearest is off by a twelfth of a squared step each, always the same: 200 / 3.
    """
    assert mean_z_squared(INT8) <= 1 + 4 * 0.125
    assert mean_z_squared(NEAREST) > 1 + 4 * 0.125


def test_only_what_is_asked_for_is_computed() -> None:
    x, weights = sample(3, HIDDEN), [sample(4, HIDDEN, seed=s) for s in (1, 2)]
    weights[1] = weights[1].detach()
    first, second = linears(x, weights)
    dx, dweight = torch.autograd.grad(second.sum() + 0 * first.sum(), [x, weights[0]])
    assert torch.allclose(dx, weights[1].sum(0).expand_as(dx), atol=1e-5)
    assert torch.equal(dweight, torch.zeros_like(dweight))
    # And a result that nobody uses has no gradient at all.
    (alone,) = torch.autograd.grad(linears(x, weights)[1].sum(), [x])
    assert torch.allclose(alone, dx)


def test_nothing_is_kept_without_grad_mode() -> None:
    x, weight = sample(3, HIDDEN), sample(4, HIDDEN, seed=1)
    with torch.no_grad():
        normed = rms_norm(x)
        assert torch.equal(linear(normed, weight), functional.linear(normed.y, weight))
    # What was made without grad mode has no pack: the product then keeps its input.
    (dweight,) = torch.autograd.grad(linear(normed, weight).sum(), [weight])
    assert torch.allclose(dweight, normed.y.sum(0).expand_as(dweight))


def test_weight_of_the_norm_changed_before_backward_is_an_error() -> None:
    x, scale, weight = sample(3, HIDDEN), sample(HIDDEN, seed=1), sample(4, HIDDEN, seed=2)
    total = linear(rms_norm(x.detach(), scale), weight).sum()
    with torch.no_grad():
        scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, weight)


def test_autocast_computes_in_its_type() -> None:
    x, (weights, biases) = sample(32, HIDDEN), parameters()

    def function() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return linears(rms_norm(x), weights, biases)

    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(rms_norm(x).y, weights, biases)
    for ours, theirs in zip(function(), expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs)
    for gradient in gradients(function, [x, *weights, *biases[:2]]):
        assert gradient.dtype == torch.float32


def test_autocasts_cache_is_left_alone() -> None:
    """A cast that autograd did not see, once cached, would cost the next user its gradient."""
    x, weight = sample(3, HIDDEN), sample(4, HIDDEN, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight)
        total = functional.linear(x, weight).float().sum()
    (dweight,) = torch.autograd.grad(total, weight)
    assert dweight.abs().sum() > 0


def test_module_takes_torchs_place_and_a_norm() -> None:
    x, module, ours = sample(3, HIDDEN), torch.nn.Linear(HIDDEN, 4), Linear(HIDDEN, 4)
    ours.load_state_dict(module.state_dict())
    assert torch.equal(ours(x), module(x))
    normed = rms_norm(x)
    assert torch.equal(ours(normed), module(normed.y))


def test_gradient_lies_in_memory_as_a_transposed_weight_does() -> None:
    """Else autograd copies it, to have it as the weight itself is."""
    x, weight = sample(4, 128), sample(128, 256, seed=1)
    (gradient,) = torch.autograd.grad(linear(x, weight.t(), keep=NEAREST).sum(), weight)
    assert gradient.is_contiguous()


# Rows that are much larger than others, as of what stands for padding, cost these nothing.

MAPS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, v, w, keep: linear(x, v, keep=keep),
    "silu": lambda x, v, w, keep: silu(x @ v.t(), keep=keep),
    "swiglu": lambda x, v, w, keep: swiglu(x @ v.t() / 100, x @ w.t(), keep=keep),
    "gelu_linear": lambda x, v, w, keep: gelu_linear(x @ v.t(), w, keep=keep),
    "two_linears": lambda x, v, w, keep: two_linears(
        x, TwoLinears([v, w], [None, None], "gelu"), keep=keep
    ),
}


def cosine_of_small_rows(name: str, width: int) -> float:
    torch.manual_seed(0)
    weights = [(torch.randn(width, width) / width**0.5).requires_grad_() for _ in range(2)]
    x, dy = torch.randn(4, 32, width), torch.randn(4, 32, width)
    x[:, 1::2] *= 300
    dy[:, 1::2] = 0

    def gradient(level: str) -> Sequence[Tensor]:
        y = MAPS[name](x.clone().requires_grad_() * 1, *weights, Compression(level=level))
        return torch.autograd.grad(y, weights, dy, allow_unused=True)

    pairs = zip(gradient("int8"), gradient("keep"), strict=True)
    return worst_cosine(*zip(*[pair for pair in pairs if pair[0] is not None], strict=True))


@pytest.mark.parametrize("width", [24, 48, 96, 100, 192])
@pytest.mark.parametrize("name", MAPS)
def test_rows_of_any_length_are_exact_beside_much_larger_ones(name: str, width: int) -> None:
    assert cosine_of_small_rows(name, width) >= 0.999


@pytest.mark.parametrize("name", MAPS)
def test_rows_that_share_groups_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (keeping, fused_linear, feed_forward):
        monkeypatch.setattr(module, "in_rows", lambda spec, _: spec)
    assert cosine_of_small_rows(name, 96) < 0.95
