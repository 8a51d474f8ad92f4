"""The backward kernels of the norms, in Triton's interpreter: right to their roundings."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from interpreted_nn import interpreted_nn
from test_nn_norm_kernels import (
    EXACT,
    INT8,
    UNIT,
    Case,
    affine_of,
    every_case,
    packed,
)
from torch import Tensor

from vramx.kernels import norm_backward_launch
from vramx.nn import reference_norm as reference
from vramx.nn.keeping import decode

pytest.importorskip("triton")


class Backward(NamedTuple):
    dx: Tensor
    dweight: Tensor
    dbias: Tensor

    def within(self, other: Backward, bounds: Backward) -> bool:
        # Not `>`: a NaN must not pass.
        groups = zip(self, other, bounds, strict=True)
        return all(bool(((a - b).abs() <= bound).all()) for a, b, bound in groups)


def backward_inputs(case: Case) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Random gradients, what is kept of a random input, and the factors."""
    generator = torch.Generator().manual_seed(5)
    dy, dsum, x = (torch.randn(case.rows, case.hidden, generator=generator) for _ in range(3))
    if case.halves:
        dy, dsum = dy.bfloat16(), dsum.bfloat16()
    n, rstd = reference.normalise(x, 1e-5, case.centred)
    return dy, dsum if case.residual else None, packed(n, case.spec), rstd


def backward(
    case: Case, defect: str = "", *, leading: tuple[int, ...] = (),
    dtype: torch.dtype | None = None, of_weight: torch.dtype = torch.float32,
) -> Backward:  # fmt: skip
    """Run the kernels on gradients of a type, with rows in a batch, and a weight of a type."""
    *gradients, kept, rstd = backward_inputs(case)
    dy, dsum = (
        None if t is None else t.to(dtype or t.dtype).view(*(leading or t.shape[:1]), case.hidden)
        for t in gradients
    )
    assert dy is not None
    return Backward(
        *interpreted_nn().operator(
            "norm_backward", dy, dsum, affine_of(case)[0].to(of_weight), kept,
            rstd.view(dy.shape[:-1]), case.centred, dy.dtype, [1, int(case.centred)],
            list(case.spec), defect=defect,
        )
    )  # fmt: skip


def exact_backward(case: Case) -> tuple[Backward, Backward]:
    """Return the gradients in float64 and how far float32 may be from them.

    A sum of m terms is off by at most m roundings of the sum of their magnitudes, to first order;
    what follows a row's sums takes fewer than eight more. To bfloat16 the interpreter cuts: a unit.
    """
    dy, dsum, kept, rstd = backward_inputs(case)
    weight, _ = affine_of(case)
    n = decode(kept, dy.shape, torch.float32, case.spec).double()
    dy, rstd, weight = dy.double(), rstd.double(), weight.double()
    g, residual = dy * weight, 0.0 if dsum is None else dsum.double()
    dx = reference.gradient(dy, n, rstd, weight, case.centred) + residual
    dweight, dbias = reference.sums(dy, n)
    size = g.abs() + n.abs() * (g * n).abs().mean(-1, keepdim=True)
    size = size + (g.abs().mean(-1, keepdim=True) if case.centred else 0.0)
    of_row = (case.hidden + 8) * UNIT * (size * rstd.unsqueeze(-1) + abs(residual))
    if case.halves:
        of_row = of_row + torch.finfo(torch.bfloat16).eps * (dx.abs() + of_row)
    of_column = (case.rows + 8) * UNIT
    dweight_bound, dbias_bound = (bound * of_column for bound in reference.sums(dy.abs(), n.abs()))
    none = dbias.new_empty(0)
    return (
        Backward(dx, dweight, dbias if case.centred else none),
        Backward(of_row, dweight_bound, dbias_bound if case.centred else none),
    )


@every_case
def test_gradients_are_right_to_their_roundings(case: Case) -> None:
    assert backward(case).within(*exact_backward(case))


@pytest.mark.parametrize(
    "case", [Case(21, 128), Case(5, 384, centred=True), Case(1, 8320, EXACT)], ids=str
)
def test_sums_of_bfloat16_are_right_to_their_roundings(case: Case) -> None:
    """Each share may be cut once, by a unit of it at most, and their sum is once more."""
    dy, _, kept, _ = backward_inputs(case)
    # A weight of bfloat16 holds them exactly.
    dx, *sums = backward(case, of_weight=torch.bfloat16)
    exact, bound = exact_backward(case)
    n = decode(kept, dy.shape, torch.float32, case.spec)
    unit = torch.finfo(torch.bfloat16).eps
    assert ((dx - exact.dx).abs() <= bound.dx).all()
    sizes = reference.sums(dy.double().abs(), n.double().abs())
    for found, right, rounding, size in zip(sums, exact[1:], bound[1:], sizes, strict=True):
        if found.numel():
            assert found.dtype == torch.bfloat16
            assert ((found - right).abs() <= rounding + (2 + unit) * unit * size).all()
            assert not ((found - right).abs() <= rounding).all()


@pytest.mark.parametrize(
    ("of_weight", "of_bias", "of_shares"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, None, torch.float32),
    ],
)
def test_shares_are_narrow_only_where_all_sums_are_bfloat16(
    of_weight: torch.dtype, of_bias: torch.dtype | None, of_shares: torch.dtype
) -> None:
    """Of float16 they would lose bits, or overflow where their sum does not."""
    dweight, dbias = (None if d is None else torch.empty(8, dtype=d) for d in (of_weight, of_bias))
    shares = norm_backward_launch._partial(norm_backward_launch.Shares(dweight, dbias), 3, 8)
    given = [share for share in shares if share is not None]
    assert len(given) == 1 + (of_bias is not None)
    assert all(share.dtype == of_shares and share.shape == (3, 8) for share in given)


@pytest.mark.parametrize(
    "case",
    [
        Case(22, 128, residual=True),
        Case(6, 1024, centred=True, halves=True),
        Case(4, 8320, EXACT),  # sums in a pass of their own
    ],
    ids=str,
)
def test_rows_may_be_those_of_a_batch(case: Case) -> None:
    flat = backward(case)
    dx, *sums = backward(case, leading=(2, case.rows // 2))
    assert dx.shape == (2, case.rows // 2, case.hidden)
    assert all(map(torch.equal, (dx.flatten(0, 1), *sums), flat))


@pytest.mark.parametrize(
    "case",
    [Case(77, 128, residual=True, halves=True), Case(7, 384, centred=True, halves=True)],
    ids=str,
)
def test_halves_have_the_gradients_of_floats(case: Case) -> None:
    """A float's tiles may be staged in another number. The interpreter cuts to bfloat16: a unit."""
    dx, *sums = backward(case)
    exact, *exact_sums = backward(case, dtype=torch.float32)
    assert ((dx - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()
    assert all(map(torch.equal, sums, exact_sums))


DEFECTS_OF_BACKWARD = {
    "one factor for all rows of a gradient": Case(21, 128),
    "a group left out of a gradient's sums": Case(3, 256),
    "a group left out of a centred gradient's sums": Case(3, 256, centred=True),
    "a gradient's weights of the first group": Case(3, 256),
    "the scales of an odd row read as of an even one": Case(3, 384),
}


@pytest.mark.parametrize("defect", DEFECTS_OF_BACKWARD)
def test_comparison_sees_a_defect_in_backward(defect: str) -> None:
    case = DEFECTS_OF_BACKWARD[defect]
    assert not backward(case, defect).within(*exact_backward(case))


def test_no_rows_give_sums_of_zero() -> None:
    none = torch.empty(0, 256)
    dx, dweight, _ = interpreted_nn().operator(
        "norm_backward", none, None, torch.ones(256), torch.empty(0, dtype=torch.uint8),
        torch.empty(0), False, none.dtype, [1, 0], list(INT8),
    )  # fmt: skip
    assert dx.shape == (0, 256)
    assert torch.equal(dweight, torch.zeros(256))


@every_case
def test_output_again_is_what_was_kept(case: Case) -> None:
    dy, _, kept, _ = backward_inputs(case)
    affine = affine_of(case)
    shape, dtype = list(dy.shape), dy.dtype
    (y,) = interpreted_nn().operator(
        "norm_output", kept, *affine, shape, dtype, dtype, list(case.spec)
    )
    n = decode(kept, shape, dtype, case.spec)
    assert torch.equal(y, reference.affine(n, *affine))
