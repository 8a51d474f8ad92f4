"""Two Linears in one operator: results, gradients, what is kept, against the functions of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted_nn import interpreted_nn
from nn_elementwise_tools import differs
from norm_tools import EXACT, NEAREST, gradients, sample
from torch import Tensor

from vramx.compression.config import Compression
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.functional import layer_norm, linears
from vramx.nn.unit_linear import gelu_linear, silu_linear

INPUTS, INNER = 128, 256


def leaves(dtype: torch.dtype = torch.float32, inputs: int = INPUTS, inner: int = INNER) -> Any:
    """Return x, and the weights, biases and scale, which keep the size of what goes through."""
    shapes = (inner, inputs), (inputs, inner)
    weights = [sample(*s, seed=9, dtype=dtype) / s[1] ** 0.5 for s in shapes]
    ends = [sample(size, seed=7, dtype=dtype) for size in (inner, inputs, inputs)]
    found = [each.detach().requires_grad_() for each in (*weights, *ends)]
    return sample(32, inputs, dtype=dtype), *found


def terms(v: Any, w: Any, b: Any, c: Any, scale: Any, kind: str = "gelu") -> TwoLinears:
    return TwoLinears([v, w], [b, c], kind, scale)


def apart(x: Any, terms: TwoLinears, residual: Tensor | None, keep: Compression) -> Tensor:
    """Return the same by the functions for each."""
    (v, w), (b, c), kind, scale = terms
    if scale is not None:
        w, c = w * scale.view(-1, 1), None if c is None else c * scale
    (wide,) = linears(x, [v], [b], keep)
    function = silu_linear if kind == "silu" else gelu_linear
    return function(wide, w, c, residual=residual, keep=keep)


KEEPS = {"int8": NEAREST, "exact": EXACT, "int4": Compression(level="int4", rounding="nearest")}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("is_autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("source", ["norm", "tensor"])
@pytest.mark.parametrize("kind", ["gelu", "silu"])
def test_it_is_the_functions_one_after_the_other(
    keep: Compression, is_autocast: bool, source: str, kind: str
) -> None:
    x, *others = leaves()

    def call(function: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            of: Any = layer_norm(x, keep=keep) if source == "norm" else x
            return [function(of, terms(*others, kind=kind), x, keep)]

    ours, theirs = call(two_linears), call(apart)
    assert torch.equal(*ours, *theirs)
    assert ours[0].dtype == torch.float32
    found = gradients(lambda: call(two_linears), [x, *others])
    expected = gradients(lambda: call(apart), [x, *others])
    # Under autocast the functions apart round a bias's gradient to bfloat16.
    half = 2.0**-8 * (1 + 2**-16) if is_autocast else 0.0
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        assert ((a - b).abs() <= (half if a.dim() == 1 else 0.0) * b.abs()).all()
    # A sum of the scale's over inputs, and one over a bias, in another order than autograd's: 257
    # terms, and float32 has 2**-24.
    bias, scale = others[-2:]
    rounded = half * (expected[-2] / scale * bias).norm()
    assert (found[-1] - expected[-1]).norm() <= 257 * 2**-24 * expected[-1].norm() + rounded


@pytest.mark.parametrize("missing", [(2,), (3,), (4,), (2, 3, 4)])
def test_biases_and_the_scale_may_be_missing(missing: tuple[int, ...]) -> None:
    x, *others = leaves()
    some = [None if i in missing else each for i, each in enumerate(others)]
    there = [x, *(each for each in some if each is not None)]
    found = gradients(lambda: [two_linears(x, terms(*some), None, NEAREST)], there)
    expected = gradients(lambda: [apart(x, terms(*some), None, NEAREST)], there)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 257 * 2**-24 * b.norm()


@pytest.mark.parametrize("place", range(6))
def test_each_gradient_comes_alone(place: int) -> None:
    """What is frozen is not needed for what is not."""
    every = leaves()
    mine = [each.detach().requires_grad_(i == place) for i, each in enumerate(every)]
    (found,) = gradients(lambda: [two_linears(mine[0], terms(*mine[1:]))], [mine[place]])
    expected = gradients(lambda: [two_linears(every[0], terms(*every[1:]))], list(every))
    # Noise differs, so only that it is the right one: int8's is 1 %, another's 100 %.
    assert (found - expected[place]).norm() <= 0.05 * expected[place].norm()


def arguments(form: list[int]) -> tuple[Any, ...]:
    """Return arguments of the forward operator, of a tensor that is kept as it is."""
    x, *others = (t.detach() for t in leaves(inputs=64, inner=128))
    kept = (x, x, None, None, None, 0.0, False, x.dtype, [-1, 0, 0, 0, 0])
    v, w, b, c, scale = others
    return x[:5], v, b, w, c, scale, x[:5], "gelu", form, *kept


def backward_arguments(form: list[int]) -> tuple[Any, ...]:
    """Return arguments of the backward operator that asks for all; the pack is of a norm."""
    x, v, _, w, c, scale, *_ = arguments(form)
    spec = [8, 64, 1, 0, 0]
    _, buffer = torch.ops.vramx.two_linears(*arguments(form))
    kept, _ = torch.ops.vramx.keep(x, spec)
    incoming, gain = sample(5, 64, seed=4).detach(), sample(64, seed=2).detach()
    return (
        incoming, buffer, kept, gain, None, v, w, c, scale, "gelu", form, x.dtype, spec, [True] * 6
    )  # fmt: skip


FORMS = pytest.mark.parametrize("form", [[8, 64, 1, 0, 0], [0, 0, 0, 0, 0]], ids=["int8", "raw"])


@FORMS
def test_kernel_is_the_composite(form: list[int]) -> None:
    found = interpreted_nn().operator("two_linears", *arguments(form))
    assert differs(found[0], torch.ops.vramx.two_linears(*arguments(form))[0]) <= 1


@FORMS
def test_kernel_of_backward_is_the_composite(form: list[int]) -> None:
    of = backward_arguments(form)
    expected = torch.ops.vramx.two_linears_backward(*of)

    def worst(**options: Any) -> float:
        found = interpreted_nn().operator("two_linears_backward", *of, **options)
        return max(differs(*pair) for pair in zip(found, expected, strict=True))

    assert worst() <= 1
    assert worst(defect="slope of the activation") > 1
