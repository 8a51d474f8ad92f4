"""peft's adapters on models of transformers: what fused blocks compute and keep of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optimize_tools import (
    INT8_NOISE,
    LAYERS,
    ROUNDING,
    assert_computes,
    error,
    family,
    gradient_of,
    hugging_face,
    optimised_copy,
    result_of,
    twin,
)

import vramx
from benchmarks.programs._adapters import TARGETS, Adapters, adapt_with_peft

pytestmark = pytest.mark.usefixtures("seeded")

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# Every Linear of a block.
ADAPTED = {
    **dict.fromkeys(("llama", "mistral", "qwen3", "gemma"), TARGETS),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "bert": ("query", "key", "value", "dense"),
    "vit": ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"),
}
Model = tuple[Any, dict[str, torch.Tensor]]


def adapted(name: str = "llama", targets: Any = None, **options: Any) -> Model:
    """Return a model with adapters whose gradients are not zero, and its inputs."""
    model, inputs = hugging_face(transformers, name)
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **options}
    config = peft.LoraConfig(target_modules=list(targets or ADAPTED[name]), **options)
    return peft.get_peft_model(model, config).train(), inputs


def lora_rows(report: Any) -> dict[str, str]:
    return {row.name: row.reason for row in report.left if row.name.endswith(TARGETS)}


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_every_family_learn_as_in_the_original(name: str, level: str) -> None:
    original, inputs = adapted(name)
    model = twin(original)
    report = vramx.optimize(model, level)
    assert not [row for row in report.left if row.reason and "called as it is" in row.reason]
    assert_computes(model, original, inputs, level, LAYERS)


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
def test_adapters_of_convolutional_blocks_learn_as_in_the_original(level: str) -> None:
    original, inputs = family("convnext")
    adapt_with_peft(original, Adapters(("fc1", "fc2"), 4, 8.0, 0.0), torch.float32)
    assert_computes(optimised_copy(original, level), original, inputs, level)


@pytest.mark.parametrize("first", ["optimise", "adapt"])
def test_adapters_may_come_before_and_after_optimising(first: str) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    torch.manual_seed(1)
    expected = peft.get_peft_model(original, config)
    torch.manual_seed(1)
    if first == "optimise":
        vramx.optimize(model, "keep")
    found = peft.get_peft_model(model, config)
    if first == "adapt":
        assert lora_rows(vramx.optimize(found, "keep")) == {}
    assert_computes(found, expected, inputs, fused=LAYERS)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"lora_bias": True},
        {"modules_to_save": ["input_layernorm"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1}},
        {"layers_to_transform": [0]},
        {"bias": "all"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_kinds_of_adapters_that_are_understood_are_fused(options: dict[str, Any]) -> None:
    # Only Qwen2's Linears have biases, which an adapter's own may go into.
    name = "qwen2" if "bias" in next(iter(options)) else "llama"
    original, inputs = adapted(name, TARGETS[:3] if name == "qwen2" else None, **options)
    model = twin(original)
    assert lora_rows(vramx.optimize(model, "keep")) == {}
    assert_computes(model, original, inputs)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"use_dora": True}, "Dora"),
        ({"alora_invocation_tokens": [14, 3], "task_type": "CAUSAL_LM"}, "ALora"),
    ],
    ids=["dora", "alora"],
)
def test_variants_are_called_as_they_are_and_named(options: dict[str, Any], word: str) -> None:
    original, inputs = adapted(targets=["q_proj", "down_proj"], **options)
    # What wakes an aLoRA, in the middle of both rows.
    inputs["input_ids"][:, 6:8] = torch.tensor([14, 3])
    model = twin(original)
    rows = lora_rows(vramx.optimize(model, "keep"))
    assert len(rows) == 2 * LAYERS
    assert all(word in reason and "called as it is" in reason for reason in rows.values())
    assert_computes(model, original, inputs)


def test_adapters_are_added_chosen_disabled_and_merged_after_optimising() -> None:
    original, inputs = adapted()
    model = optimised_copy(original, "keep")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    for each in (original, model):
        torch.manual_seed(3)
        each.add_adapter("other", config)
    seen = [result_of(original, inputs)]
    for active in ("other", ["default", "other"]):
        for each in (original, model):
            each.base_model.set_adapter(active)
        assert_computes(model, original, inputs)
        seen.append(result_of(original, inputs))
    with model.disable_adapter(), original.disable_adapter():
        assert error(result_of(model, inputs), result_of(original, inputs)) < ROUNDING
        seen.append(result_of(original, inputs))
    assert all(error(a, b) > 0.01 for i, a in enumerate(seen) for b in seen[:i])
    for change in (model.merge_adapter, model.unmerge_adapter, model.merge_and_unload):
        assert error(result_of(change() or model, inputs), seen[2]) < ROUNDING


def test_saved_adapter_is_an_ordinary_one(tmp_path: Path) -> None:
    model, inputs = adapted()
    names = list(model.state_dict())
    vramx.optimize(model)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    base, _ = hugging_face(transformers, "llama")
    other = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(result_of(other.eval(), inputs), result_of(model.eval(), inputs))


def test_restored_model_is_the_original_to_the_bit() -> None:
    model, inputs = adapted()
    expected, gradient = result_of(model, inputs), gradient_of(model, inputs)
    vramx.optimize(model)
    gradient_of(model, inputs)
    vramx.restore(model)
    assert torch.equal(result_of(model, inputs), expected)
    assert torch.equal(gradient_of(model, inputs), gradient)


@pytest.mark.parametrize("level", ["int8", "recompute_mlp", "recompute_all"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_the_model_itself_works_on_top(reentrant: bool, level: str) -> None:
    original, inputs = adapted()
    model = optimised_copy(original, level)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    y = result_of(model, inputs)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (y * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert error(gradient, gradient_of(original, inputs)) < INT8_NOISE


def test_recomputed_dropout_draws_the_masks_of_the_forward_pass() -> None:
    model, inputs = adapted(lora_dropout=0.4)
    gradients = []
    for level in ("keep", "recompute_all"):
        vramx.optimize(model, level, rounding="nearest")
        torch.manual_seed(7)
        gradients.append(gradient_of(model, inputs))
    assert error(*gradients) < INT8_NOISE


def test_adapters_in_float32_on_halves_are_computed_as_peft_does() -> None:
    original, inputs = adapted()
    for module in original.modules():
        if not any("lora_" in name for name, _ in module.named_parameters()):
            module.to(torch.bfloat16)
    model = optimised_copy(original, "keep")
    # Some twenty roundings of bfloat16 in each layer, independent: half a step times their root.
    bound = torch.finfo(torch.bfloat16).eps / 2 * (20 * LAYERS) ** 0.5
    assert error(result_of(model, inputs), result_of(original, inputs)) < bound
    # Backward has as many, on top of those of the results.
    assert error(gradient_of(model, inputs), gradient_of(original, inputs)) < 2 * bound


def test_autocast_computes_as_the_original_does() -> None:
    original, inputs = adapted()
    model = optimised_copy(original, "keep")
    bound = torch.finfo(torch.bfloat16).eps / 2 * (20 * LAYERS) ** 0.5
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = result_of(model, inputs), result_of(original, inputs)
    assert y.dtype == expected.dtype
    assert error(y, expected) < bound


def test_copy_of_a_model_with_adapters_learns_apart() -> None:
    model, inputs = adapted()
    vramx.optimize(model, "keep")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert error(result_of(other, inputs), result_of(model, inputs)) > 0.01
