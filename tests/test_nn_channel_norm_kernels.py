"""The kernels of normalisation by channel against plain torch, in Triton's interpreter.

It fuses nothing: results and bytes are equal, but for exponentials, and sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from interpreted_nn import call_operator, interpreted_nn
from torch import Tensor

from vramx.nn.keeping import BY_SIGNS, ORDERS, RAW, SIGNS, Spec

pytest.importorskip("triton")

INT8, NEAREST, ASYMMETRIC = Spec(8, 128, 1, 1), Spec(8, 128, 1, 0), Spec(8, 64, 0, 1)
INT4, EXACT, NOTHING = Spec(4, 64, 0, 1), Spec(RAW, 0, 0, 0), Spec(-1, 0, 0, 0)
# An exponential and a division: numpy's are other than torch's, by a few units of float32.
CLOSE = 2e-6


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    positions: str
    kind: str = "leaky_relu"
    leak: float = 0.0
    spec: Spec = INT8
    groups: int = 0
    residual: bool = False
    given: bool = False
    last: bool = False

    def __str__(self) -> str:
        bits = {RAW: "exact", -1: "nothing", SIGNS: "signs"}.get(
            self.spec.bits, str(self.spec.bits)
        )
        words = ["x".join(map(str, self.shape)), self.positions, self.kind, bits]
        words += [name for name in ("residual", "given", "last") if getattr(self, name)]
        return "-".join(words)

    @property
    def form(self) -> list[int]:
        return list(self.spec._replace(order=int(self.last)))


CASES = [
    Case((9, 64, 3, 5), "rows", last=True),  # channels within a group of the codec; one is cut
    Case((1, 256, 3, 3), "rows", residual=True, last=True),  # groups within the channels
    Case((3, 24, 5, 5), "rows", "leaky_relu", 0.1, last=True),  # neither; an odd number of them
    Case((70, 20), "rows", "silu", spec=NEAREST),
    Case((37, 32), "rows", "silu", spec=ASYMMETRIC),
    Case((3, 64, 3, 5), "rows", spec=EXACT, last=True),
    Case((2, 44, 7, 7), "short", residual=True),
    Case((2, 34, 8, 8), "short", "none", spec=EXACT),
    Case((1, 2, 41, 50), "long"),
    Case((1, 2, 2050), "long", "gelu", spec=ASYMMETRIC),
    Case((2, 2, 41, 50), "long", "gelu_tanh", groups=2),
    Case((2, 18, 8, 8), "short", groups=3),
    Case((2, 64, 3, 5), "rows", spec=INT4, last=True),
    Case((2, 64, 3, 5), "rows", "none", given=True, last=True),
    Case((2, 44, 7, 7), "short", spec=EXACT, given=True),
    Case((2, 64, 3, 5), "rows", spec=NOTHING, last=True),
    Case((9, 64, 3, 5), "rows", spec=BY_SIGNS, given=True, last=True),
    Case((3, 24, 5, 5), "rows", "leaky_relu", 0.1, BY_SIGNS, residual=True, given=True, last=True),
    Case((2, 44, 7, 7), "short", "none", spec=BY_SIGNS, given=True),
    Case((1, 2, 41, 50), "long", spec=BY_SIGNS, given=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(seed: int, case: Case) -> Tensor:
    x = sample(seed, *case.shape)
    return x.contiguous(memory_format=ORDERS[1]) if case.last else x


def inputs(case: Case) -> list[object]:
    channels = case.shape[1]
    x, residual = image(0, case), image(1, case) if case.residual else None
    if case.residual:
        x[0, 0].fill_(torch.nan)  # it must stay in its channel
    statistics = (sample(4, channels), sample(5, channels).square()) if case.given else (None, None)
    return [
        x, residual, sample(2, channels), sample(3, channels), *statistics,
        case.given, case.groups, 1e-5, case.kind, case.leak, case.form,
    ]  # fmt: skip


def same(found: Tensor, expected: Tensor, case: Case) -> bool:
    if case.kind in ("leaky_relu", "none") or found.dtype == torch.uint8:
        return torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    return torch.allclose(found, expected, rtol=CLOSE, atol=CLOSE)


@every_case
def test_forward_is_plain_torchs_to_the_bit(case: Case) -> None:
    found = interpreted_nn().operator("channel_norm", *inputs(case))
    expected = call_operator("channel_norm", inputs(case))
    assert all_same(found, expected, case)


def all_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], case: Case) -> bool:
    """Compare all but the probe, and of the bits what is not beyond the last element's."""
    *_, bits, _ = expected
    used = torch.Size(case.shape).numel() // 8 if bits.numel() else 0
    pairs = [*zip(found[:5], expected[:5], strict=True), (found[5][:used], bits[:used])]
    return all(same(ours, theirs, case) for ours, theirs in pairs)


def backward_inputs(case: Case, wanted: list[int]) -> list[object]:
    plain = replace(case, residual=False)
    arguments = inputs(plain)
    *_, rstd, kept, bits, _ = call_operator("channel_norm", arguments)
    rstd = arguments[5] if case.given else rstd
    return [
        image(6, case), arguments[2], arguments[3], kept, rstd, bits, case.groups, case.given,
        case.kind, case.leak, torch.float32, wanted, case.form,
    ]  # fmt: skip


kept_cases = pytest.mark.parametrize("case", [c for c in CASES if c.spec.bits >= RAW], ids=str)


ALL, SOME = [1, 1, 1, 1], [1, 0, 1, 0]
# Without the weight's: of these, where nothing but signs is kept.
LINEAR = ([1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0])


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        *((case, ALL) for case in CASES if case.spec.bits >= RAW),
        *((case, wanted) for case in CASES if case.spec == BY_SIGNS for wanted in LINEAR),
        *((CASES[i], SOME) for i in (0, 4, 7, 8, 13)),  # of each position, packed and exact, given
    ],
    ids=str,
)
def test_gradients_are_plain_torchs(case: Case, wanted: list[int]) -> None:
    """dx is computed of factors, and rounded as often; sums are of the same numbers."""
    arguments = backward_inputs(case, wanted)
    found = interpreted_nn().operator("channel_norm_backward", *arguments)
    expected = call_operator("channel_norm_backward", arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@kept_cases
def test_output_again_is_plain_torchs(case: Case) -> None:
    _, weight, bias, kept, _, bits, *_ = backward_inputs(case, [1, 1, 1, 1])
    arguments = [
        kept, bits, weight, bias, list(case.shape), case.groups, case.kind, case.leak,
        torch.float32, torch.float32, case.form,
    ]  # fmt: skip
    (found,) = interpreted_nn().operator("channel_norm_output", *arguments)
    assert same(found, *call_operator("channel_norm_output", arguments), case)


DEFECTS = {
    "the channel of a tile's first element": CASES[8],
    "channels that begin anew in each tile": CASES[2],
    "channels of what is beyond the end": CASES[6],
    "bits of the neighbouring byte": CASES[0],
    "a slope for all channels": CASES[1],
    "headers of the first group": CASES[0],
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_comparison_sees_a_defect(defect: str) -> None:
    case = DEFECTS[defect]
    forward = interpreted_nn().operator("channel_norm", *inputs(case), defect=defect)
    expected = call_operator("channel_norm", inputs(case))
    arguments = backward_inputs(case, [1, 1, 1, 1])
    dx = interpreted_nn().operator("channel_norm_backward", *arguments, defect=defect)[0]
    right = call_operator("channel_norm_backward", arguments)[0]
    equal = all_same(forward, expected, case)
    assert not (equal and torch.allclose(dx, right, rtol=1e-5, atol=1e-5))
