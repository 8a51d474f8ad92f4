"""The norms on a CPU: what they return, their gradients, what they keep, and how they are used.

Gradients of what is packed are within what the codec's step allows; exact ones are in
test_nn_derivatives.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from norm_tools import EXACT, INT4, INT8, NEAREST, norm_of, sample, step_of, torchs_norm
from torch import Tensor

from vramx.compression.codec import random
from vramx.compression.codec.codec import pack
from vramx.compression.config import Compression
from vramx.kernels import launch, start
from vramx.nn import keeping
from vramx.nn import reference_norm as reference
from vramx.nn.dropout import dropout_add
from vramx.nn.functional import rms_norm
from vramx.nn.norm import Sources, norm

HIDDEN = 256
KINDS = {"rms": False, "layer": True}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)


def inputs(
    kind: str, *shape: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None]]:
    """Return x, a residual, and weight and bias."""
    x, residual = (sample(*shape, seed=seed, dtype=dtype) for seed in (0, 1))
    weight, bias = (sample(shape[-1], seed=seed, dtype=dtype) for seed in (2, 3))
    return x, residual, (weight, bias if KINDS[kind] else None)


@every_kind
@every_dtype
@pytest.mark.parametrize("keep", [EXACT, INT8, INT4], ids=["exact", "int8", "int4"])
def test_output_is_torchs(kind: str, dtype: torch.dtype, keep: Compression) -> None:
    """Both compute in float32 and round once at the end; float32 rounds on the way as well: each of
    a row's sums by less than 10 of its units, as they are added in pairs."""
    x, residual, affine = inputs(kind, 3, 5, HIDDEN, dtype=dtype)
    done = norm_of(kind, x, affine, residual, keep)
    expected = torchs_norm(kind, x + residual, affine)
    assert torch.equal(done.residual_sum, x + residual)
    assert done.y.dtype == dtype
    wide = max(torch.finfo(torch.float32).eps if dtype != torch.float64 else 0, 2.0**-52)
    tolerance = torch.finfo(dtype).eps + 20 * wide
    assert torch.allclose(done.y, expected, rtol=tolerance, atol=20 * wide)


def bounds_of_int8(
    kind: str, s: Tensor, dy: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return exact gradients of x and weight, and how far x's and weight's may be, in float64.

    With d <= step the error of n: dweight = sum dy n is off by sum |dy| d; and dx, where it has
    n mean(g n), by r (d |mean(g n)| + (|n| + d) mean(|g| d)).
    """
    n, rstd = reference.normalise(s.detach().double(), 1e-5, KINDS[kind])
    dy, weight = dy.double(), weight.detach().double()
    d, g = step_of(n), dy * weight
    along = (g * n).mean(-1, keepdim=True).abs()
    off = d * along + (n.abs() + d) * (g.abs() * d).mean(-1, keepdim=True)
    return off * rstd.unsqueeze(-1), *reference.sums(dy.abs(), d)[:1], n


@every_kind
@pytest.mark.parametrize("keep", [INT8, NEAREST, INT4], ids=["stochastic", "nearest", "4 bits"])
def test_int8_gradients_are_within_a_step(kind: str, keep: Compression) -> None:
    """And those of 4 bits are not."""
    x, residual, affine = inputs(kind, 7, HIDDEN, dtype=torch.float32)
    dy = sample(7, HIDDEN, seed=8).detach()
    done = norm_of(kind, x, affine, residual, keep)
    found = torch.autograd.grad(done.y, [x, affine[0]], dy, retain_graph=True)
    exact = torch.autograd.grad(torchs_norm(kind, x + residual, affine), [x, affine[0]], dy)
    rounding = 1e-5  # float32's, of sums of 256 terms of order 1
    for ours, theirs, off in zip(
        found, exact, bounds_of_int8(kind, x + residual, dy, affine[0])[:2], strict=True
    ):
        assert ((ours - theirs).abs() <= off + rounding).all() == (keep is not INT4)


@every_kind
@pytest.mark.parametrize("keep", [INT8, NEAREST], ids=["stochastic", "nearest"])
def test_pack_is_the_codecs_of_the_normalised_input(kind: str, keep: Compression) -> None:
    x = sample(5, HIDDEN)
    random.manual_seed(3)
    kept, again = (norm_of(kind, x, keep=keep).kept for _ in range(2))
    random.manual_seed(3)
    n, rstd = reference.normalise(x.detach(), 1e-5, KINDS[kind])
    assert torch.equal(kept.buffer, pack(n.view(-1), keep.format()).buffer)
    assert torch.equal(kept.rstd, rstd)
    assert torch.equal(kept.buffer, again.buffer) == (keep is NEAREST)  # noise is new


def test_weight_changed_before_backward_is_an_error() -> None:
    x, weight = sample(3, HIDDEN), sample(HIDDEN, seed=1)
    y = rms_norm(x, weight).y
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_may_be_changed_in_place() -> None:
    """Not even without a weight, where y is what is kept, does backward see it."""
    x = sample(3, HIDDEN)
    done, again = (rms_norm(x, keep=EXACT) for _ in range(2))
    with torch.no_grad():
        done.y.mul_(2)
    dy = torch.ones(3, HIDDEN)
    assert torch.equal(*(torch.autograd.grad(each.y, x, dy)[0] for each in (done, again)))


@every_kind
def test_gradient_of_the_sum_alone_passes_through(kind: str) -> None:
    x, residual, affine = inputs(kind, 3, HIDDEN)
    total = norm_of(kind, x, affine, residual).residual_sum
    for gradient in torch.autograd.grad(total, [x, residual], torch.ones_like(total)):
        assert torch.equal(gradient, torch.ones_like(total))


def test_residual_of_another_type_promotes_as_addition_does() -> None:
    x, residual = sample(3, HIDDEN, dtype=torch.bfloat16), sample(3, HIDDEN, seed=1)
    done = rms_norm(x, residual=residual)
    assert torch.equal(done.residual_sum, x + residual)
    dx, dresidual = torch.autograd.grad(
        done.y.square().sum() + done.residual_sum.sum(), [x, residual]
    )
    assert (dx.dtype, dresidual.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("keep", [NEAREST, EXACT])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32,) * 2])
def test_dropout_and_addition_before_a_norm_are_those_of_their_own_operators(
    dtypes: tuple[torch.dtype, torch.dtype], keep: Compression
) -> None:
    def run(is_one: bool) -> list[Tensor]:
        torch.manual_seed(0)
        x, residual = (torch.randn(8, 128).to(dtype).requires_grad_() for dtype in dtypes)
        weight, bias = torch.randn(2, 128).requires_grad_().unbind()
        how = (weight, bias), (1e-5, True), keep
        if is_one:
            y, total, _ = norm(Sources(x, residual, 0.3), *how)
        else:
            y, total, _ = norm(Sources(dropout_add(x, residual, 0.3)), *how)
        result = (y * total.sin()).sum()
        return [y, total, *torch.autograd.grad(result, [x, residual, weight, bias])]

    for one, other in zip(run(True), run(False), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(HIDDEN,), (0, HIDDEN), (2, 0, HIDDEN), (2, 3, 4, HIDDEN)])
def test_any_number_of_rows_works(shape: tuple[int, ...]) -> None:
    x, weight = sample(*shape), sample(HIDDEN, seed=1)
    y = rms_norm(x, weight, 1e-5).y
    dx, dweight = torch.autograd.grad(y.sum(), [x, weight])
    assert y.shape == dx.shape == shape
    assert dweight.isfinite().all()


def test_rows_need_not_follow_each_other() -> None:
    x = sample(HIDDEN, 6)
    y = rms_norm(x.t(), keep=EXACT).y
    dy = sample(HIDDEN, 6, seed=1).detach().t()
    exact = functional.rms_norm(x.t(), (HIDDEN,))
    assert torch.allclose(y, exact, atol=1e-6)
    ours, theirs = (torch.autograd.grad(each, x, dy)[0] for each in (y, exact))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_row_with_nan_stays_alone() -> None:
    x = sample(3, HIDDEN).detach()
    x[1, 3] = torch.nan
    x.requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x).y.sum(), x)
    assert dx.isnan().all(1).tolist() == [False, True, False]
    assert dx[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("version", "is_served"), [((3, 2), False), ((3, 3), True), ((4, 0), True)]
)
def test_kernels_are_left_to_a_triton_that_compiles_them(
    version: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "supported", lambda _: True)
    monkeypatch.setattr(start, "triton_version", lambda: version)
    monkeypatch.setattr(keeping, "_launches_on", keeping._launches_on.__wrapped__)  # no cache
    assert keeping.served(torch.ones(2)) == is_served


def test_options_are_told_from_those_that_lay_where_they_do() -> None:
    for _ in range(100):  # each takes the place of the one before
        for level, bits in (("int8", 8), ("int4", 4), ("keep", keeping.RAW)):
            assert keeping.spec_of(Compression(level=level)).bits == bits
