"""Linears with low-rank adapters in fused blocks, by a stand-in that is shaped as peft's are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_tools import INPUTS, TARGETS, Quantised, adapted, linears_of, quantised
from norm_tools import held_bytes
from optimize_tools import (
    HIDDEN,
    LAYERS,
    ROUNDING,
    assert_computes,
    encoder,
    error,
    fused_calls,
    gradient_of,
    optimised_copy,
    result_of,
    twin,
)
from torch import nn

import vramx
from benchmarks.programs._adapters import Adapters, adapt_without_peft

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp", "recompute_all"])
@pytest.mark.parametrize("kind", ["float", "double", "bias", "two", "learning"])
def test_adapters_learn_as_in_the_original(kind: str, level: str) -> None:
    dtype = torch.float64 if kind == "double" else torch.float32
    original = adapted(dtype=dtype)
    for linear in linears_of(original):
        if kind in ("two", "bias"):
            linear.add(Adapters(rank=3, dropout=0.0), "other", bias=kind == "bias")
        linear.base_layer.requires_grad_(kind == "learning")
    model = twin(original)
    report = vramx.optimize(model, level)
    assert not [row for row in report.left if row.reason]
    assert_computes(model, original, INPUTS, level, LAYERS)


def test_merged_unmerged_and_disabled_adapters_are_as_in_the_original() -> None:
    original = adapted()
    model = optimised_copy(original, "keep")
    states = [result_of(model, INPUTS)]
    for change in ("merge", "unmerge", "disable", "merge and disable"):
        for linear in (*linears_of(model), *linears_of(original)):
            linear.disable_adapters = "disable" in change
            if change != "disable":
                getattr(linear, change.partition(" ")[0])()
        with fused_calls() as calls:
            states.append(result_of(model, INPUTS))
        assert len(calls) == LAYERS
        assert error(states[-1], result_of(original, INPUTS)) < ROUNDING
    plain, merged, unmerged, disabled, merged_and_disabled = states
    # What was merged is not taken out of a weight to the bit.
    assert error(merged, plain) < ROUNDING
    assert error(unmerged, plain) < ROUNDING
    assert error(disabled, plain) > 0.01
    assert error(merged_and_disabled, disabled) < ROUNDING
    assert not any(linear.merged for linear in linears_of(model))


def test_adapters_that_come_and_go_after_optimising_count() -> None:
    model = adapted()
    vramx.optimize(model, "keep")
    for linear in linears_of(model):
        linear.add(Adapters(rank=2, dropout=0.0), "late")
    for names in (["default", "late"], ["late"], []):
        for linear in linears_of(model):
            linear.active_adapters = names
        other = twin(model)
        vramx.restore(other)
        assert error(result_of(model, INPUTS), result_of(other, INPUTS)) < ROUNDING
        if names:
            assert_computes(model, other, INPUTS)


@pytest.mark.parametrize("count", [1, 2])
def test_dropout_before_adapters_is_as_strong_as_the_originals(count: int) -> None:
    model = adapted(0.4)
    for linear in linears_of(model):
        linear.scaling["default"] = 20.0
        if count == 2:
            linear.add(Adapters(rank=4, alpha=40.0, dropout=0.4), "other")
    differences = []
    for change in (vramx.optimize, vramx.restore):
        change(model)
        runs = [result_of(model, INPUTS).detach() for _ in range(6)]
        differences.append(sum(error(a, b) for a, b in itertools.pairwise(runs)))
    assert differences[0] > 0.1
    # A mask that is missing, or shared by two adapters, changes them by more than a fifth.
    assert 0.85 < differences[0] / differences[1] < 1.18
    model.eval()
    vramx.optimize(model)
    assert torch.equal(result_of(model, INPUTS), result_of(model, INPUTS))


def test_gradient_after_dropout_is_that_of_the_result() -> None:
    model = adapted(0.4)
    vramx.optimize(model, "keep")
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return result_of(model.double(), {"src": INPUTS["src"].double()}).square().sum()

    model.double()
    gradient = torch.autograd.grad(loss(), parameters)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
    step, values = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=sign * step)
        values.append(float(loss()))
    # A central difference: the third derivative counts by the square of the step.
    assert abs((values[0] - values[1]) / (2 * step) - slope) < 1e-4 * abs(slope)


def as_before_variants(linear: Any, use_dora: dict[str, bool]) -> None:
    """Have what an adapted layer has in releases of peft before 0.16."""
    del linear.lora_variant
    linear.use_dora, linear.lora_magnitude_vector = use_dora, None


def with_two_parts(linear: Any) -> None:
    linear.lora_B["default"] = nn.Sequential(nn.Identity(), linear.lora_B["default"])


NOT_UNDERSTOOD: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "hook": ("hooks", lambda _: None),
    "inner hook": ("no", lambda _: None),
    "variant": (
        "'default' is a Identity",
        lambda linear: linear.lora_variant.update({"default": nn.Identity()}),
    ),
    "older": ("DoRA", lambda linear: as_before_variants(linear, {"default": True})),
    "unknown": ("the parts of a known release", lambda linear: as_before_variants(linear, {})),
    "dropout": (
        "AlphaDropout",
        lambda linear: linear.lora_dropout.update({"default": nn.AlphaDropout(0.0)}),
    ),
    "two parts": ("not of two plain Linears", with_two_parts),
}


@pytest.mark.parametrize("change", NOT_UNDERSTOOD)
def test_adapter_that_is_not_understood_is_called_as_it_is_and_named(change: str) -> None:
    original, seen = adapted(), list[int]()
    words, make = NOT_UNDERSTOOD[change]
    for linear in linears_of(original):
        make(linear)
    model = twin(original)
    for linear in linears_of(model):
        hooked = {"hook": linear, "inner hook": linear.lora_A["default"]}.get(change)
        if hooked is not None:
            hooked.register_forward_hook(lambda *_: seen.append(1))
    report = vramx.optimize(model, "keep")
    reasons = [row.reason for row in report.left if row.name.endswith(TARGETS)]
    assert len(reasons) == 2 * LAYERS
    assert all(words in reason and "called as it is" in reason for reason in reasons)
    result_of(model, INPUTS)
    assert len(seen) == (2 * LAYERS if "hook" in change else 0)
    assert_computes(model, original, INPUTS)


def test_adapters_of_releases_before_variants_are_fused() -> None:
    original = adapted()
    for linear in linears_of(original):
        as_before_variants(linear, {"default": False})
    model = twin(original)
    assert not [row for row in vramx.optimize(model, "keep").left if row.reason]
    assert_computes(model, original, INPUTS)


@pytest.mark.parametrize("level", ["keep", "int8"])
def test_quantised_base_is_called_and_its_adapters_are_fused(level: str) -> None:
    original = quantised(adapted(), Quantised)
    model = optimised_copy(original, level)
    gradient_of(model, INPUTS)
    assert {linear.base_layer.calls for linear in linears_of(model)} == {1}
    assert_computes(model, original, INPUTS, level)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_frozen_block_keeps_no_more_than_a_learning_one(dropout: float) -> None:
    rank, held = 4, []
    for frozen in (False, True):
        model: Any = encoder(norm_first=True)
        if frozen:
            adapt_without_peft(model, Adapters(TARGETS, rank, dropout=dropout), torch.float32)
        for layer in model.layers:  # what attention keeps is torch's
            layer.self_attn.requires_grad_(False)
        vramx.optimize(model)
        held.append(held_bytes(functools.partial(model, **INPUTS), *model.parameters()))
    tokens = INPUTS["src"].numel() // HIDDEN
    # The products of the first weights, in float32, and the keys of masks.
    narrow = LAYERS * 2 * (tokens * rank * 4 + 16)
    assert held[1] <= held[0] + narrow


@pytest.mark.slow
def test_compiled_block_with_adapters_is_one_graph() -> None:
    original = adapted()
    compiled = torch.compile(optimised_copy(original), backend="aot_eager", fullgraph=True)
    assert_computes(compiled, original, INPUTS, "int8")
