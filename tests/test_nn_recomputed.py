"""Parts that run again in backward on what a norm keeps: with adapters, quantised, checkpointed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from adapter_tools import INPUTS, TARGETS, Quantised, adapted, linears_of, quantised
from norm_tools import EXACT, held_bytes, sample
from optimize_tools import (
    HIDDEN,
    INT8_NOISE,
    LAYERS,
    ROUNDING,
    assert_computes,
    error,
    gradient_of,
    optimised_copy,
    result_of,
    twin,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import vramx
from benchmarks.programs._adapters import Adapters
from vramx.compression.codec.codec import layout_of
from vramx.compression.config import Format
from vramx.nn.linear import linears
from vramx.nn.norm import rms_norm
from vramx.nn.readers import Behind
from vramx.nn.recomputed import recomputed
from vramx.nn.unit_linear import unit_linear

pytestmark = pytest.mark.usefixtures("seeded")


def done(report: Any) -> set[str]:
    return {row.done for row in report.swapped}


@pytest.mark.parametrize("targets", [TARGETS, ("linear1",), ("linear2",)])
@pytest.mark.parametrize("kind", ["one", "two", "quantised", "learning"])
def test_part_with_adapters_is_recomputed_and_learns(kind: str, targets: tuple[str, ...]) -> None:
    original = adapted(targets=targets)
    for linear in linears_of(original):
        if kind == "two":
            linear.add(Adapters(rank=3, dropout=0.0), "other")
        linear.base_layer.requires_grad_(kind == "learning")
    if kind == "quantised":
        quantised(original, Quantised)
    model = twin(original)
    report = vramx.optimize(model, "recompute_mlp")
    # A base of an unknown class may compute what jumps with its input.
    assert done(report) == ({"int8"} if kind == "quantised" else {"recompute_mlp"})
    assert_computes(model, original, INPUTS, "recompute_mlp", LAYERS)


def test_quantised_base_of_a_known_class_is_recomputed() -> None:
    original = quantised(adapted())
    model = twin(original)
    assert done(vramx.optimize(model, "recompute_mlp")) == {"recompute_mlp"}
    gradient = gradient_of(model, INPUTS)
    assert {linear.base_layer.calls for linear in linears_of(model)} == {2}
    assert error(gradient, gradient_of(original, INPUTS)) < INT8_NOISE


@pytest.mark.parametrize("count", [1, 2])
def test_second_run_has_the_masks_of_the_first(count: int) -> None:
    model = adapted(0.4)
    if count == 2:
        for linear in linears_of(model):
            linear.add(Adapters(rank=4, alpha=8.0, dropout=0.4), "other")
    gradients = []
    for level in ("int8", "recompute_mlp"):
        vramx.optimize(model, level)
        torch.manual_seed(5)
        gradients.append(gradient_of(model, INPUTS))
    # Other masks change a gradient by more than its size.
    assert error(*gradients) < 2 * INT8_NOISE


def test_part_keeps_nothing_but_the_norms_pack() -> None:
    held, x = [], INPUTS["src"].clone().requires_grad_()
    for level in ("int8", "recompute_mlp"):
        model = adapted()
        vramx.optimize(model, level)
        held.append(held_bytes(functools.partial(model, x), x, *model.parameters()))
    tokens = x.numel() // HIDDEN
    # A pack of what goes into the activation, its probe, and two products of rank 4.
    inside = layout_of(tokens * 2 * HIDDEN, Format()).buffer_bytes + 4 + 2 * tokens * 4 * 4
    assert held[0] - held[1] == LAYERS * inside


def test_adapters_that_are_switched_before_backward_learn_as_in_forward() -> None:
    model = adapted()
    for linear in linears_of(model):
        linear.add(Adapters(rank=2, dropout=0.0), "late")
        linear.active_adapters = ["default"]
    vramx.optimize(model, "recompute_mlp")
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(result_of(model, INPUTS).sum(), parameters, allow_unused=True)
    loss = result_of(model, INPUTS).sum()
    for linear in linears_of(model):
        linear.active_adapters = ["late"]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    assert [g is None for g in found] == [g is None for g in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    assert all(error(a, b) < INT8_NOISE for a, b in pairs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_block_runs_its_part_twice(reentrant: bool) -> None:
    original = quantised(adapted())
    model = optimised_copy(original, "recompute_mlp")
    x = INPUTS["src"].clone().requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    original(INPUTS["src"]).sum().backward()
    expected = [p.grad for p in original.parameters() if p.requires_grad]
    assert all(error(a, b) < INT8_NOISE for a, b in zip(found, expected, strict=True))
    # A reentrant one cannot be seen: in its second run the part is a region of its own.
    most = 3 if reentrant else 2
    assert {linear.base_layer.calls for linear in linears_of(model)} == {most}


# -- The function ----------------------------------------------------------------------------------


def part(weights: list[Tensor], source: Any, residual: Tensor | None) -> Tensor:
    gate, up, down = weights
    inside = linears(source, [gate, up], keep=EXACT)
    return unit_linear(inside, "silu", Behind(down, None, residual), EXACT)[0]


def leaves(
    dtype: torch.dtype = torch.float64, width: int = 16, inner: int = 24
) -> tuple[Tensor, list[Tensor]]:
    weights = [sample(inner, width, seed=i, dtype=dtype) for i in (1, 2)]
    return sample(2, 5, width, dtype=dtype), [*weights, sample(width, inner, seed=3, dtype=dtype)]


@pytest.mark.parametrize("adds", [True, False])
def test_exact_part_has_the_gradients_of_a_part_that_is_kept(adds: bool) -> None:
    x, weights = leaves()
    found = []
    run = functools.partial(part, weights)
    for again in (False, True):
        normed = rms_norm(x * 1, None, 1e-6, keep=EXACT)
        total = normed.residual_sum if adds else None
        y = recomputed(run, normed, total, EXACT) if again else run(normed, total)
        found.append(torch.autograd.grad((y**2).sum(), [x, *weights]))
    assert all(error(a, b) < 1e-12 for a, b in zip(*found, strict=True))


def test_backward_can_be_repeated_and_differentiated() -> None:
    x, weights = leaves(width=4, inner=5)  # each number is varied, twice

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        run = functools.partial(part, list(weights))
        normed = rms_norm(x, None, 1e-6, keep=EXACT)
        return recomputed(run, normed, None, EXACT)

    y = function(x, *weights)
    first, second = (torch.autograd.grad(y.sum(), [x], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    inputs = [t.detach()[:1, :2].requires_grad_() if t is x else t for t in (x, *weights)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_plain_tensor_is_packed_once_for_the_part() -> None:
    x, weights = leaves(torch.bfloat16)
    run = functools.partial(part, weights)
    held = held_bytes(lambda: recomputed(run, x * 1, None, None), *weights)
    assert held < 1.2 * x.numel() + 256  # a small tensor's pack is of whole groups


def test_nothing_runs_twice_without_gradients() -> None:
    x, weights = leaves()
    calls: list[int] = []

    def run(source: Any, residual: Tensor | None) -> Tensor:
        calls.append(1)
        return part(weights, source, residual)

    with torch.no_grad():
        y = recomputed(run, x, None, EXACT)
    assert not y.requires_grad
    assert len(calls) == 1


@pytest.mark.parametrize("keep", [None, EXACT], ids=["packed", "kept"])
@pytest.mark.parametrize("of", ["itself", "view", "other half"])
def test_residual_in_the_memory_of_the_input_does_not_hide_it(of: str, keep: Any) -> None:
    weight, whole = sample(128, 128, seed=3), sample(64, 256, seed=4)

    def gradients(run: Any) -> tuple[Tensor, ...]:
        halves = 1.0 * whole  # a new one, which no other use keeps
        y = halves[:, :128]
        residual = {"itself": y, "view": y.view(64, 128), "other half": halves[:, 128:]}[of]
        return torch.autograd.grad(run(y, residual).square().sum(), (whole, weight))

    def part(source: Any, residual: Tensor | None) -> Tensor:
        assert residual is not None
        return residual + torch.tanh(0.05 * getattr(source, "y", source) @ weight)

    found = gradients(lambda y, residual: recomputed(part, y, residual, keep))
    for ours, right in zip(found, gradients(part), strict=True):
        assert error(ours, right) < (INT8_NOISE if keep is None else ROUNDING)
