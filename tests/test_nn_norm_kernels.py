"""The kernels of the norms against the reference, in Triton's interpreter.

The interpreter computes in numpy, one operation at a time and nothing fused. Inputs are small
integers, so that means and sums of squares are exact in any order; with the kernel's own factor the
normalised rows are then the same numbers to the bit, and so must be the packed bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from interpreted_nn import interpreted_nn
from torch import Tensor

from vramx.compression import random
from vramx.compression import reference as codec
from vramx.kernels import norm_backward_launch
from vramx.kernels.layout import Layout
from vramx.nn import reference_norm as reference
from vramx.nn.keeping import RAW, Spec, decode

pytest.importorskip("triton")

INT8, NEAREST, INT8_16 = Spec(8, 128, 1, 1), Spec(8, 128, 1, 0), Spec(8, 16, 1, 1)
INT8_1024 = Spec(8, 1024, 1, 1)
INT4, ASYMMETRIC, EXACT = Spec(4, 64, 0, 1), Spec(8, 128, 0, 1), Spec(RAW, 0, 0, 0)
UNIT = 2.0**-24  # the largest relative error of one rounding to float32


@dataclass(frozen=True)
class Case:
    rows: int
    hidden: int
    spec: Spec = INT8
    centred: bool = False
    residual: bool = False
    halves: bool = False  # gradients are bfloat16

    def __str__(self) -> str:
        name = "layer" if self.centred else "rms"
        kept = "exact" if self.spec.bits == RAW else f"{self.spec.bits}g{self.spec.group_size}"
        more = "-residual" * self.residual + "-halves" * self.halves
        return f"{name}-{self.rows}x{self.hidden}-{kept}{more}"


CASES = [
    Case(1, 128),
    Case(21, 128, centred=True),  # 16 rows a program: a whole tile, and a short one
    Case(3, 256, NEAREST, residual=True),
    Case(3, 384, centred=True, residual=True),  # groups beyond the row
    Case(2, 4096, centred=True, residual=True),
    Case(5, 48, INT8_16),
    Case(3, 640, EXACT, centred=True),
    Case(3, 100, EXACT, residual=True),  # not a multiple of anything
    Case(3, 96),  # a group straddles rows: packed by a second pass
    Case(3, 128, INT4),
    Case(3, 128, ASYMMETRIC, centred=True),
    Case(2, 9216, INT8_1024, centred=True),  # sums in a pass of their own
    Case(3, 8320, EXACT),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
Operators = Callable[..., tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def interpreted() -> Operators:
    return interpreted_nn().operator


def integers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


def affine_of(case: Case) -> tuple[Tensor, Tensor | None]:
    weight = integers(2, case.hidden) / 4 + 0.125
    return weight, integers(3, case.hidden) if case.centred else None


@dataclass(frozen=True)
class Forward:
    x: Tensor
    residual: Tensor | None
    y: Tensor
    total: Tensor
    kept: Tensor
    rstd: Tensor

    @property
    def summed(self) -> Tensor:
        return self.x if self.residual is None else self.x + self.residual


def forward(interpreted: Operators, case: Case, defect: str = "") -> Forward:
    x = integers(0, case.rows, case.hidden)
    residual = integers(1, case.rows, case.hidden) if case.residual else None
    y, total, kept, rstd, _ = interpreted(
        "norm", x, residual, *affine_of(case), 1e-5, case.centred, x.dtype, list(case.spec),
        defect=defect,
    )  # fmt: skip
    return Forward(x, residual, y, total, kept, rstd)


def normalised_with(rstd: Tensor, s: Tensor, centred: bool) -> Tensor:
    mean = s.mean(-1, keepdim=True) if centred else 0.0
    return (s - mean) * rstd.unsqueeze(-1)


def packed(n: Tensor, spec: Spec) -> Tensor:
    """What the codec makes of it with the noise that a call of the operator draws first."""
    if spec.bits == RAW:
        return n.reshape(-1).view(torch.uint8)
    layout = Layout(n.numel(), spec.bits, spec.group_size, bool(spec.symmetric))
    random.manual_seed(0, rank=0)
    noise = random.state("cpu") if spec.stochastic else None
    return codec.quantize(n.reshape(-1), layout, noise=noise, stream=0)


@every_case
def test_kept_bytes_are_the_codecs(interpreted: Operators, case: Case) -> None:
    done = forward(interpreted, case)
    expected = packed(normalised_with(done.rstd, done.summed, case.centred), case.spec)
    assert torch.equal(done.kept, expected)


@every_case
def test_output_and_sum_equal_the_reference(interpreted: Operators, case: Case) -> None:
    done = forward(interpreted, case)
    normalised = normalised_with(done.rstd, done.summed, case.centred)
    assert torch.equal(done.y, reference.affine(normalised, *affine_of(case)))
    if case.residual:
        assert torch.equal(done.total, done.summed)


@every_case
def test_factor_is_right_to_four_roundings(interpreted: Operators, case: Case) -> None:
    """The division, the addition of eps, the root and its inverse; the sums are exact, but for the
    centred squares of rows that are no power of two: one more for each of the 14 halvings."""
    done = forward(interpreted, case)
    _, exact = reference.normalise(done.summed.double(), 1e-5, case.centred)
    roundings = 4 + (14 if case.centred else 0)
    assert ((done.rstd - exact).abs() <= roundings * UNIT * exact).all()


def test_nothing_is_written_where_nothing_is_kept(interpreted: Operators) -> None:
    nothing = [-1, 0, 0, 0]
    x = integers(0, 3, 256)
    y, _, kept, rstd, _ = interpreted("norm", x, None, None, None, 1e-5, False, x.dtype, nothing)
    assert kept.numel() == rstd.numel() == 0
    assert torch.equal(y, reference.normalise(x, 1e-5, False)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_differ_by_their_rounding(interpreted: Operators, dtype: torch.dtype) -> None:
    """The interpreter cuts where a GPU rounds to nearest: a whole unit of the type, not half."""
    x, residual = (integers(seed, 3, 256).to(dtype) for seed in (0, 1))
    weight = (integers(2, 256) / 4).to(dtype)
    y, total, _, _, _ = interpreted(
        "norm", x, residual, weight, None, 1e-5, False, dtype, list(INT8)
    )
    exact = reference.normalise((x + residual).double(), 1e-5, False)[0] * weight
    assert torch.equal(total, x + residual)
    unit = torch.finfo(dtype).eps
    assert ((y - exact).abs() <= (unit + 8 * UNIT) * exact.abs()).all()


DEFECTS_OF_FORWARD = {
    "scale rounded to nearest": Case(21, 128),
    "one factor for all rows": Case(21, 128),
    "a group left out of the sums": Case(3, 256, centred=True),
    "weights of the first group": Case(3, 256),
}


@pytest.mark.parametrize("defect", DEFECTS_OF_FORWARD)
def test_comparison_sees_a_defect_in_forward(interpreted: Operators, defect: str) -> None:
    case = DEFECTS_OF_FORWARD[defect]
    right, wrong = forward(interpreted, case), forward(interpreted, case, defect)
    assert not (torch.equal(right.kept, wrong.kept) and torch.equal(right.y, wrong.y))


@dataclass(frozen=True)
class Backward:
    dx: Tensor
    dweight: Tensor
    dbias: Tensor

    def within(self, other: Backward, bounds: Backward) -> bool:
        pairs = ((self.dx, other.dx, bounds.dx), (self.dweight, other.dweight, bounds.dweight))
        pairs = (*pairs, (self.dbias, other.dbias, bounds.dbias))
        # Not `>`: a NaN must not pass.
        return all(bool(((a - b).abs() <= bound).all()) for a, b, bound in pairs)


def backward_inputs(case: Case) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Random gradients, what is kept of a random input, and the factors."""
    generator = torch.Generator().manual_seed(5)
    dy, dsum, x = (torch.randn(case.rows, case.hidden, generator=generator) for _ in range(3))
    if case.halves:
        dy, dsum = dy.bfloat16(), dsum.bfloat16()
    n, rstd = reference.normalise(x, 1e-5, case.centred)
    return dy, dsum if case.residual else None, packed(n, case.spec), rstd


def backward(interpreted: Operators, case: Case, defect: str = "") -> Backward:
    dy, dsum, kept, rstd = backward_inputs(case)
    weight, _ = affine_of(case)
    wanted = [1, int(case.centred)]
    gradients = interpreted(
        "norm_backward", dy, dsum, weight, kept, rstd, case.centred, dy.dtype, wanted,
        list(case.spec), defect=defect,
    )  # fmt: skip
    return Backward(*gradients)


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
def test_gradients_are_right_to_their_roundings(interpreted: Operators, case: Case) -> None:
    assert backward(interpreted, case).within(*exact_backward(case))


@pytest.mark.parametrize(
    "case", [Case(21, 128), Case(5, 384, centred=True), Case(1, 8320, EXACT)], ids=str
)
def test_sums_of_bfloat16_are_right_to_their_roundings(interpreted: Operators, case: Case) -> None:
    """Each share may be cut once, by a unit of it at most, and their sum is once more."""
    dy, dsum, kept, rstd = backward_inputs(case)
    weight = affine_of(case)[0].bfloat16()  # holds them exactly
    dx, *sums = interpreted(
        "norm_backward", dy, dsum, weight, kept, rstd, case.centred, dy.dtype,
        [1, int(case.centred)], list(case.spec),
    )  # fmt: skip
    exact, bound = exact_backward(case)
    n = decode(kept, dy.shape, torch.float32, case.spec)
    unit = torch.finfo(torch.bfloat16).eps
    assert ((dx - exact.dx).abs() <= bound.dx).all()
    vectors = zip(
        sums, (exact.dweight, exact.dbias), (bound.dweight, bound.dbias),
        reference.sums(dy.double().abs(), n.double().abs()), strict=True,
    )  # fmt: skip
    for found, right, rounding, size in vectors:
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
def test_rows_may_be_those_of_a_batch(interpreted: Operators, case: Case) -> None:
    dy, dsum, kept, rstd = backward_inputs(case)
    weight, _ = affine_of(case)

    def call(*leading: int) -> tuple[Tensor, ...]:
        gradients = (None if t is None else t.view(*leading, case.hidden) for t in (dy, dsum))
        return interpreted(
            "norm_backward", *gradients, weight, kept, rstd.view(leading), case.centred,
            dy.dtype, [1, int(case.centred)], list(case.spec),
        )  # fmt: skip

    flat, (dx, *sums) = call(case.rows), call(2, case.rows // 2)
    assert dx.shape == (2, case.rows // 2, case.hidden)
    assert all(map(torch.equal, (dx.flatten(0, 1), *sums), flat))


@pytest.mark.parametrize(
    "case", [Case(77, 128, residual=True), Case(7, 384, centred=True)], ids=str
)
def test_halves_have_the_gradients_of_floats(interpreted: Operators, case: Case) -> None:
    """A float's tiles may be staged in another number. The interpreter cuts to bfloat16: a unit."""
    gradients, (kept, rstd) = backward_inputs(case)[:2], backward_inputs(case)[2:]
    weight, _ = affine_of(case)

    def call(dtype: torch.dtype) -> tuple[Tensor, ...]:
        dy, dsum = (None if t is None else t.bfloat16().to(dtype) for t in gradients)
        wanted = [1, int(case.centred)]
        return interpreted(
            "norm_backward", dy, dsum, weight, kept, rstd, case.centred, dtype, wanted,
            list(case.spec),
        )  # fmt: skip

    (dx, *sums), (exact, *exact_sums) = call(torch.bfloat16), call(torch.float32)
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
def test_comparison_sees_a_defect_in_backward(interpreted: Operators, defect: str) -> None:
    case = DEFECTS_OF_BACKWARD[defect]
    assert not backward(interpreted, case, defect).within(*exact_backward(case))


def test_no_rows_give_sums_of_zero(interpreted: Operators) -> None:
    none = torch.empty(0, 256)
    dx, dweight, _ = interpreted(
        "norm_backward", none, None, torch.ones(256), torch.empty(0, dtype=torch.uint8),
        torch.empty(0), False, none.dtype, [1, 0], list(INT8),
    )  # fmt: skip
    assert dx.shape == (0, 256)
    assert torch.equal(dweight, torch.zeros(256))


@every_case
def test_output_again_is_what_was_kept(interpreted: Operators, case: Case) -> None:
    dy, _, kept, _ = backward_inputs(case)
    affine = affine_of(case)
    shape, dtype = list(dy.shape), dy.dtype
    (y,) = interpreted("norm_output", kept, *affine, shape, dtype, dtype, list(case.spec))
    n = decode(kept, shape, dtype, case.spec)
    assert torch.equal(y, reference.affine(n, *affine))
