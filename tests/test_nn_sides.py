"""Weights of adapters beside a Linear's own: results, gradients, masks, bytes, errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_tools import EXACT, INT8_STEP, NEAREST, gradients, sample
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.nn import reference_elementwise as reference
from vramx.nn.dropout import dropout
from vramx.nn.linear import linears
from vramx.nn.low_rank import add_low_rank
from vramx.nn.norm import rms_norm
from vramx.nn.readers import Behind
from vramx.nn.sides import Side
from vramx.nn.unit_linear import unit_linear

INPUTS, OUTPUTS, RANK = 128, 5, 3
F64 = torch.float64
# Sums of some hundred terms in another order, in float64.
ORDER = 1e-12


def close(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True)
    return all((a - b).norm() <= ORDER * b.norm() for a, b in pairs)


def leaves(dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return an input, a frozen weight, and two sides."""
    weight = sample(OUTPUTS, INPUTS, seed=1, dtype=dtype).detach()
    sides = (sample(RANK, INPUTS, seed=2 + i, dtype=dtype) for i in range(2))
    return sample(2, 4, INPUTS, dtype=dtype), weight, *sides


def plain(x: Tensor, weight: Tensor, sides: list[Side]) -> list[Tensor]:
    return [F.linear(x, weight), *(F.linear(dropout(x, s.p), s.weight) for s in sides)]


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("normed", [True, False])
def test_linears_with_sides_are_the_products_one_by_one(normed: bool, p: float) -> None:
    x, weight, a, b = leaves()

    def source() -> Any:
        return rms_norm(x, keep=EXACT) if normed else x

    def ours() -> Any:
        torch.manual_seed(3)
        return linears(source(), [weight], None, EXACT, sides=[Side(a), Side(b, p)])

    def theirs() -> Any:
        torch.manual_seed(3)
        y = source()
        return plain(y.y if normed else y, weight, [Side(a), Side(b, p)])

    assert close(ours(), theirs())
    assert close(gradients(ours, [x, a, b]), gradients(theirs, [x, a, b]))


def test_masks_of_two_sides_are_independent_and_new_in_each_call() -> None:
    x, weight, a, _ = leaves()
    _, first, second = linears(x, [weight], sides=[Side(a, 0.5), Side(a, 0.5)])
    _, third, _ = linears(x, [weight], sides=[Side(a, 0.5), Side(a, 0.5)])
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_sides_of_another_type_are_computed_in_it(p: float) -> None:
    x, weight, a, _ = leaves(torch.bfloat16)
    wide = a.detach().float().requires_grad_()
    torch.manual_seed(3)
    base, h = linears(x, [weight], None, EXACT, sides=[Side(wide, p)])
    torch.manual_seed(3)
    expected = F.linear(dropout(x.float(), p), wide)
    assert base.dtype == torch.bfloat16
    assert h.dtype == torch.float32
    assert torch.equal(h, expected)
    (found,) = torch.autograd.grad(h.sum(), [wide], retain_graph=True)
    (right,) = torch.autograd.grad(expected.sum(), [wide])
    assert (found - right).norm() <= 64 * torch.finfo(torch.float32).eps * right.norm()


def test_autocast_computes_sides_in_its_type() -> None:
    x, weight, a, _ = leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        base, h = linears(x, [weight], sides=[Side(a)])
        y = add_low_rank(base, h, sample(OUTPUTS, RANK))
    assert base.dtype == h.dtype == y.dtype == torch.bfloat16
    h.sum().backward()
    assert a.grad.dtype == torch.float32


@pytest.mark.parametrize("normed", [True, False])
def test_gradient_of_a_side_is_within_the_steps_of_a_pack(normed: bool) -> None:
    x, weight, a, b = leaves()

    def with_(keep: Any) -> Callable[[], Any]:
        def made() -> Any:
            source: Any = rms_norm(x, keep=keep) if normed else x
            return linears(source, [weight], None, keep, sides=[Side(a), Side(b)])

        return made

    exact, found = (gradients(with_(keep), [a, b]) for keep in (EXACT, NEAREST))
    for ours, right in zip(found, exact, strict=True):
        # An element is off by half a step of at most 4 deviations.
        assert 0 < (ours - right).norm() < INT8_STEP * 4 / 2 * right.norm()


UNITS = [("silu", 2), ("gelu", 2), ("gelu_tanh", 1), ("silu", 1)]


def plain_unit(inside: list[Tensor], kind: str, behind: Behind) -> list[Tensor]:
    value = (
        reference.glu(inside[0], inside[1], kind)
        if len(inside) > 1
        else reference.activation(inside[0], kind)
    )
    weight, bias, residual, side = behind
    result = value if weight is None else F.linear(value, weight, bias)
    made = [result if residual is None else result + residual]
    return made if side is None else [*made, F.linear(dropout(value, side.p), side.weight)]


def unit_inputs(count: int) -> list[Tensor]:
    return [sample(2, 4, INPUTS, seed=20 + i, dtype=F64) for i in range(count)]


@pytest.mark.parametrize("weighted", ["frozen", "learning", "none"])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize(("kind", "count"), UNITS)
def test_unit_with_a_side_is_the_composite(kind: str, count: int, p: float, weighted: str) -> None:
    inside, (_, weight, a, _) = unit_inputs(count), leaves()
    residual = sample(2, 4, OUTPUTS, seed=8, dtype=F64)
    every = [*inside, a]
    if weighted == "learning":
        every.append(weight.requires_grad_())
    behind = Behind(None, None, None, Side(a, p))
    if weighted != "none":
        behind = Behind(weight, None, residual, Side(a, p))

    def run(function: Any) -> Any:
        torch.manual_seed(3)
        return function()

    ours = functools.partial(run, lambda: unit_linear(inside, kind, behind, EXACT))
    theirs = functools.partial(run, lambda: plain_unit(inside, kind, behind))
    assert close(ours(), theirs())
    assert close(gradients(ours, every), gradients(theirs, every))
    if not p:
        halves = [run(lambda: unit_linear(inside, kind, behind, EXACT))[i] for i in range(2)]
        right = theirs()
        for i in range(2):  # one of the two results alone
            found = torch.autograd.grad(halves[i].sum(), inside, retain_graph=True)
            assert close(found, torch.autograd.grad(right[i].sum(), inside, retain_graph=True))


def test_low_rank_product_is_added() -> None:
    h, weight = sample(2, 4, RANK, dtype=F64), sample(OUTPUTS, RANK, seed=2, dtype=F64)
    base, bias = sample(2, 4, OUTPUTS, seed=3, dtype=F64), sample(OUTPUTS, seed=4, dtype=F64)
    for last in (bias, None):
        expected = base + 1.5 * F.linear(h, weight, last)
        assert close([add_low_rank(base, h, weight, last, 1.5)], [expected])


def test_low_rank_product_of_another_type_is_added_before_it_is_rounded() -> None:
    h, weight = sample(4, RANK), sample(OUTPUTS, RANK, seed=2)
    base = sample(4, OUTPUTS, seed=3, dtype=torch.bfloat16)
    y = add_low_rank(base, h, weight, None, 2.0)
    assert torch.equal(y, (base.float() + 2.0 * F.linear(h, weight)).bfloat16())
    found = torch.autograd.grad(y.float().sum(), [base, h, weight])
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32, torch.float32]
