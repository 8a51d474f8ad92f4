"""Linears with low-rank adapters in fused blocks, by a stand-in that is shaped as peft's are."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from norm_tools import held_bytes
from optimize_tools import (
    HIDDEN,
    INT8_NOISE,
    LAYERS,
    ROUNDING,
    encoder,
    encoder_inputs,
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

INPUTS = encoder_inputs()
TARGETS = ("linear1", "linear2")


def adapted(dropout: float = 0.0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = encoder(norm_first=True, **options)
    return adapt_without_peft(model, Adapters(TARGETS, 4, 8.0, dropout), dtype)


def linears_of(model: Any) -> list[Any]:
    return [getattr(layer, name) for layer in model.layers for name in TARGETS]


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
    with fused_calls() as calls:
        y = result_of(model, INPUTS)
    assert len(calls) == LAYERS
    assert error(y, result_of(original, INPUTS)) < ROUNDING
    bound = ROUNDING if level == "keep" else INT8_NOISE
    assert error(gradient_of(model, INPUTS), gradient_of(original, INPUTS)) < bound


def test_merged_unmerged_and_disabled_adapters_are_as_in_the_original() -> None:
    original = adapted()
    model = optimised_copy(original, "keep")
    plain = result_of(model, INPUTS)
    states: list[Any] = []
    for change in ("merge", "unmerge", "disable", "merge and disable"):
        for linear in (*linears_of(model), *linears_of(original)):
            linear.disable_adapters = "disable" in change
            if change != "disable":
                getattr(linear, change.partition(" ")[0])()
        with fused_calls() as calls:
            states.append(result_of(model, INPUTS))
        assert len(calls) == LAYERS
        assert error(states[-1], result_of(original, INPUTS)) < ROUNDING
    # What was merged is not taken out of a weight to the bit.
    assert error(states[0], plain) < ROUNDING
    assert error(states[1], plain) < ROUNDING
    assert error(states[2], plain) > 0.01
    assert error(states[3], states[2]) < ROUNDING
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
            assert error(gradient_of(model, INPUTS), gradient_of(other, INPUTS)) < ROUNDING


@pytest.mark.parametrize("count", [1, 2])
def test_dropout_before_adapters_is_as_strong_as_the_originals(count: int) -> None:
    model = adapted(0.4)
    for linear in linears_of(model):
        linear.scaling["default"] = 20.0
        if count == 2:
            linear.add(Adapters(rank=4, alpha=40.0, dropout=0.4), "other")
    differences = []
    for optimised in (True, False):
        if optimised:
            vramx.optimize(model)
        else:
            vramx.restore(model)
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


@pytest.mark.parametrize(
    "change", ["hook", "inner hook", "variant", "older", "unknown", "dropout", "type"]
)
def test_adapter_that_is_not_understood_is_called_as_it_is_and_named(change: str) -> None:
    original = adapted()
    words = {
        "hook": "hooks", "inner hook": "no", "variant": "'default' is a Identity",
        "older": "DoRA", "unknown": "the parts of a known release",
        "dropout": "AlphaDropout", "type": "torch.float64",
    }[change]  # fmt: skip
    for linear in linears_of(original):
        if change == "variant":
            linear.lora_variant["default"] = nn.Identity()
        elif change in ("older", "unknown"):
            as_before_variants(linear, {"default": True} if change == "older" else {})
        elif change == "dropout":
            linear.lora_dropout["default"] = nn.AlphaDropout(0.0)
        elif change == "type":
            linear.lora_B["default"] = nn.Sequential(Cast(), linear.lora_B["default"])
    model = twin(original)
    seen: list[int] = []
    for linear in linears_of(model):
        hooked = {"hook": linear, "inner hook": linear.lora_A["default"]}.get(change)
        if hooked is not None:
            hooked.register_forward_hook(lambda *_: seen.append(1))
    report = vramx.optimize(model, "keep")
    reasons = [row.reason for row in report.left if row.name.endswith(TARGETS)]
    assert len(reasons) == 2 * LAYERS
    if change == "type":
        words = "not of two plain Linears"
    assert all(words in reason and "called as it is" in reason for reason in reasons)
    assert error(result_of(model, INPUTS), result_of(original, INPUTS)) < ROUNDING
    assert len(seen) == (2 * LAYERS if "hook" in change else 0)
    assert error(gradient_of(model, INPUTS), gradient_of(original, INPUTS)) < ROUNDING


def as_before_variants(linear: Any, use_dora: dict[str, bool]) -> None:
    """Have what an adapted layer has in releases of peft before 0.16."""
    del linear.lora_variant
    linear.use_dora, linear.lora_magnitude_vector = use_dora, None


def test_adapters_of_releases_before_variants_are_fused() -> None:
    original = adapted()
    for linear in linears_of(original):
        as_before_variants(linear, {"default": False})
    model = twin(original)
    assert not [row for row in vramx.optimize(model, "keep").left if row.reason]
    assert error(gradient_of(model, INPUTS), gradient_of(original, INPUTS)) < ROUNDING


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


CALLS: Counter[nn.Module] = Counter()  # not in a module, where a second run would be taken back


class Quantised(nn.Module):
    """Stands for a Linear whose weight is made when it is called."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.scale = float(linear.weight.abs().max()) / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().char(), False)

    @property
    def calls(self) -> int:
        return CALLS[self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[self] += 1
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("level", ["keep", "int8"])
def test_quantised_base_is_called_and_its_adapters_are_fused(level: str) -> None:
    original = adapted()
    for linear in linears_of(original):
        linear.base_layer = Quantised(linear.base_layer)
    model = optimised_copy(original, level)
    gradient = gradient_of(model, INPUTS)
    assert {linear.base_layer.calls for linear in linears_of(model)} == {1}
    assert error(result_of(model, INPUTS), result_of(original, INPUTS)) < ROUNDING
    bound = ROUNDING if level == "keep" else INT8_NOISE
    assert error(gradient, gradient_of(original, INPUTS)) < bound


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


def test_compiled_block_with_adapters_is_one_graph() -> None:
    model = adapted(0.0)
    gradient = gradient_of(model, INPUTS)
    vramx.optimize(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(result_of(compiled, INPUTS), result_of(model, INPUTS)) < ROUNDING
    assert error(gradient_of(compiled, INPUTS), gradient) < INT8_NOISE
