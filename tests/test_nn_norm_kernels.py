"""The kernels of the norms against the reference, in Triton's interpreter, which fuses nothing.

Inputs are small integers: sums are exact in any order, and so packed bytes are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from interpreted_nn import interpreted_nn
from torch import Tensor

from vramx.compression.codec import random
from vramx.compression.codec import reference as codec
from vramx.kernels.layout import Layout
from vramx.nn import reference_norm as reference
from vramx.nn.keeping import RAW, Spec

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


def integers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


def affine_of(case: Case) -> tuple[Tensor, Tensor | None]:
    weight = integers(2, case.hidden) / 4 + 0.125
    return weight, integers(3, case.hidden) if case.centred else None


class Forward(NamedTuple):
    x: Tensor
    residual: Tensor | None
    y: Tensor
    total: Tensor
    kept: Tensor
    rstd: Tensor

    @property
    def summed(self) -> Tensor:
        return self.x if self.residual is None else self.x + self.residual


def forward(case: Case, defect: str = "") -> Forward:
    x = integers(0, case.rows, case.hidden)
    residual = integers(1, case.rows, case.hidden) if case.residual else None
    given = (x, residual, None, 0, *affine_of(case), 1e-5, case.centred, x.dtype, list(case.spec))
    return Forward(x, residual, *interpreted_nn().operator("norm", *given, defect=defect)[:4])


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
def test_forward_is_the_references(case: Case) -> None:
    """Packed bytes, output and sum are equal; the factor is right to four roundings.

    They are the division, the addition of eps, the root and its inverse. The sums are exact, but
    for the centred squares of rows that are no power of two: one more for each of 14 halvings.
    """
    done = forward(case)
    normalised = normalised_with(done.rstd, done.summed, case.centred)
    assert torch.equal(done.kept, packed(normalised, case.spec))
    assert torch.equal(done.y, reference.affine(normalised, *affine_of(case)))
    if case.residual:
        assert torch.equal(done.total, done.summed)
    _, exact = reference.normalise(done.summed.double(), 1e-5, case.centred)
    roundings = 4 + (14 if case.centred else 0)
    assert ((done.rstd - exact).abs() <= roundings * UNIT * exact).all()


def test_nothing_is_written_where_nothing_is_kept() -> None:
    nothing = [-1, 0, 0, 0]
    x = integers(0, 3, 256)
    y, _, kept, rstd, _ = interpreted_nn().operator(
        "norm", x, None, None, 0, None, None, 1e-5, False, x.dtype, nothing
    )
    assert kept.numel() == rstd.numel() == 0
    assert torch.equal(y, reference.normalise(x, 1e-5, False)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_differ_by_their_rounding(dtype: torch.dtype) -> None:
    """The interpreter cuts where a GPU rounds to nearest: a whole unit of the type, not half."""
    x, residual = (integers(seed, 3, 256).to(dtype) for seed in (0, 1))
    weight = (integers(2, 256) / 4).to(dtype)
    y, total, _, _, _ = interpreted_nn().operator(
        "norm", x, residual, None, 0, weight, None, 1e-5, False, dtype, list(INT8)
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
def test_comparison_sees_a_defect_in_forward(defect: str) -> None:
    case = DEFECTS_OF_FORWARD[defect]
    right, wrong = forward(case), forward(case, defect)
    assert not (torch.equal(right.kept, wrong.kept) and torch.equal(right.y, wrong.y))
