"""The elementwise kernels of vramx.nn against their composites, in Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from interpreted_nn import evaluate, interpreted_nn
from nn_elementwise_tools import (
    CLOSE,
    EXACT,
    FORMATS,
    SHAPES,
    UNIT_OF_BFLOAT16,
    differs,
    differs_in_places,
    sample,
)
from norm_tools import sample as normal
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

SMALL = (1, 1, 5, 77)  # of four dimensions, whose groups have parts of several rows
LINEAR = [(9, 77), (9,)]
Call = tuple[str, list[Tensor], Tensor, dict[str, Any]]


def call_of(
    name: str, shapes: list[Any], result: Any = SMALL, dtype: Any = torch.float32, **options: Any
) -> Call:
    inputs = [sample(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    return name, inputs, sample(*result, seed=9, dtype=dtype), options


def rotary_call(size: int) -> Call:
    """Queries with tokens first in memory, and cosines for all heads; halves of sines differ."""
    q, k = normal(2, 5, 3, size).detach().transpose(1, 2), normal(2, 1, 5, size, seed=1).detach()
    angles = normal(2, 1, 5, size, seed=2).detach()
    options = {"cos": angles.cos(), "sin": angles.sin()}
    return "rotary.rotary", [q, k], normal(2, 3, 5, size, seed=3).detach(), options


KINDS: list[tuple[str, int, dict[str, Any]]] = [
    ("activation.silu", 1, {}),
    ("activation.gelu", 1, {}),
    ("activation.gelu", 1, {"approximate": "tanh"}),
    ("glu.swiglu", 2, {}),
    ("glu.geglu", 2, {}),
    ("glu.geglu", 2, {"approximate": "tanh"}),
    *(("dropout.dropout_add", 2, {"p": p}) for p in (0.25, 0.5, 1.0)),
]
CALLS = [
    *(call_of(n, [shape] * count, shape, **o) for n, count, o in KINDS for shape in SHAPES),
    *(
        call_of(name, [SMALL] * count, keep=keep)
        for name, count in (("activation.gelu", 1), ("glu.swiglu", 2))
        for keep in FORMATS.values()
    ),
    call_of("unit_linear.gelu_linear", [SMALL, *LINEAR], (1, 1, 5, 9)),
    call_of("unit_linear.silu_linear", [SMALL, *LINEAR], (1, 1, 5, 9)),
    call_of("unit_linear.glu_linear", [SMALL, SMALL, *LINEAR], (1, 1, 5, 9)),
    *map(rotary_call, (512, 128, 64, 12, 2)),  # of 512, a program takes 2 blocks of heads
]


def name_of(call: Call) -> str:
    name, inputs, _, options = call
    keep = [label for label, keep in FORMATS.items() if options.get("keep") is keep]
    others = [str(value) for value in options.values() if isinstance(value, (str, float))]
    return "-".join([name, "x".join(map(str, inputs[0].shape)), *keep, *others])


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_kernel_is_the_composite(call: Call) -> None:
    found, expected = interpreted_nn().function(*call), evaluate(*call)
    assert differs(found.result, expected.result) <= 1
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert ours is theirs is None or differs(ours, theirs) <= 1
    is_packed = call[0].startswith(("activation", "glu", "unit")) and call[3].get("keep") != EXACT
    assert len(found.packs) == is_packed * (1 + ("glu" in call[0]))
    for ours, theirs in zip(found.packs, expected.packs, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "count"), [("activation.silu", 1), ("glu.swiglu", 2)])
def test_kernel_in_bfloat16_is_off_by_one_unit(name: str, count: int) -> None:
    call = call_of(name, [SMALL] * count, dtype=torch.bfloat16)
    found, expected = interpreted_nn().function(*call), evaluate(*call)
    results = zip(
        (found.result, *found.gradients), (expected.result, *expected.gradients), strict=True
    )
    assert all(differs_in_places(*pair, UNIT_OF_BFLOAT16) <= 1 for pair in results)
    assert all(map(torch.equal, found.packs, expected.packs))


DEFECTS = {
    "slope of the activation": call_of("activation.gelu", [SMALL]),
    "slope without its second term": call_of("glu.swiglu", [SMALL] * 2),
    "the opposite angle": rotary_call(12),
    "one block of noise for all": call_of("dropout.dropout", [(40, 128)], (40, 128), p=0.5),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_comparison_sees_a_defect(defect: str) -> None:
    call = DEFECTS[defect]
    found, expected = interpreted_nn().function(*call, defect=defect), evaluate(*call)
    assert differs(found.gradients[0], expected.gradients[0]) > 1


def test_gate_and_up_have_noise_of_their_own() -> None:
    """Of equal tensors with one stream every code would be equal, and their product biased."""
    x, incoming = sample(*SMALL), sample(*SMALL, seed=2)
    call = "glu.swiglu", [x, x], incoming, {}
    assert not torch.equal(*interpreted_nn().function(*call).packs)
    assert torch.equal(*interpreted_nn().function(*call, defect="one stream for gate and up").packs)


@pytest.mark.parametrize(("name", "options"), [(name[11:], o) for name, _, o in KINDS[:3]])
def test_kernel_is_right_far_from_zero(name: str, options: dict[str, str]) -> None:
    """Where exp over- or underflows, and at zero: the values and slopes have their limits."""
    x = torch.tensor([-1e15, -1e4, -90.0, -12.0, -0.0, 0.0, 1e-30, 12.0, 90.0, 1e4, 1e15])
    call = (f"activation.{name}", [x], torch.ones(11), {**options, "keep": EXACT})
    found, expected = interpreted_nn().function(*call), evaluate(*call)
    assert torch.allclose(found.result, expected.result, rtol=CLOSE, atol=CLOSE)
    assert torch.allclose(found.gradients[0], expected.gradients[0], rtol=CLOSE, atol=CLOSE)


def off_by(found: Tensor, exact: Tensor, rounding: float) -> float:
    """Return the largest error of GELU in bounds of _gelu_of_halves() and the rounding after it."""
    bound = exact.abs() * (1 + 2**-14) * rounding + exact.abs() * 2**-14 + 2**-24
    return float(((found.double() - exact).abs() / bound).max())


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float16, 2.0**-11), (torch.bfloat16, UNIT_OF_BFLOAT16)]
)
def test_gelu_of_every_half_is_right_to_its_bound(dtype: torch.dtype, rounding: float) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    call = ("activation.gelu", [x], torch.ones_like(x), {"keep": EXACT})
    found = interpreted_nn().function(*call).result
    exact = torch.special.ndtr(x.double()) * x.double()
    assert off_by(found[x.isfinite()], exact[x.isfinite()], rounding) <= 1
    assert torch.equal(found.isnan(), x.isnan())
    assert found[x == math.inf] == math.inf
    assert found[x == -math.inf] == 0
    if dtype == torch.float16:
        wrong = interpreted_nn().function(*call, defect="a polynomial of degree 4").result
        assert off_by(wrong[x.isfinite()], exact[x.isfinite()], rounding) > 1


@pytest.mark.parametrize("numel", [1, 7, 8, 4096, 4096 * 2 + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_of_relu_is_exact(dtype: torch.dtype, numel: int) -> None:
    x, incoming = sample(numel, dtype=dtype), sample(numel, seed=1, dtype=dtype)
    x[::5] = 0
    x[1::41] = torch.nan
    found = interpreted_nn().function("relu.relu", [x], incoming, {})
    assert torch.equal(found.result.nan_to_num(7), F.relu(x).nan_to_num(7))
    assert torch.equal(found.gradients[0], torch.where(x <= 0, 0, incoming))


@pytest.mark.parametrize("name", ["activation.gelu", "activation.silu", "relu.relu"])
def test_layout_of_convolutions_stays(name: str) -> None:
    """Whatever the layout of the gradient that comes in; by the composite and by the kernel."""
    x = sample(2, 16, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    incoming = sample(2, 16, 4, 4, seed=1)
    y = getattr(F, name.partition(".")[2])(x)
    (exact,) = torch.autograd.grad(y, x, incoming)
    call = name, [x.detach()], incoming, {}
    for found in (evaluate(*call), interpreted_nn().function(*call)):
        assert found.result.is_contiguous(memory_format=torch.channels_last)
        assert differs(found.result, y.detach()) <= 1
        assert ((found.gradients[0] - exact).abs() <= incoming.abs() * 0.8 * x.max() / 126).all()
