"""Programs of peft's users, as they are written, beside their exact gradients: one of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_tools import quantised
from optimize_tools import INT8_NOISE, decoder, error, llama_block
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from benchmarks.programs._adapters import TARGETS

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LEVELS = ["int8", "recompute_mlp"]
GENERATOR = torch.Generator().manual_seed(1)
TEXT = {"input_ids": torch.randint(3, 50, (2, 24), generator=GENERATOR)}
Gradients = dict[str, Tensor]


def adapted(name: str = "default", **options: Any) -> Any:
    options = {"r": 4, "init_lora_weights": False, "target_modules": list(TARGETS), **options}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    return peft.get_peft_model(decoder(transformers), config, adapter_name=name).train()


def with_a_second() -> Any:
    model = adapted()
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=list(TARGETS))
    model.add_adapter("other", config)
    return model


def of_another_kind() -> Any:
    """Adapters of a class that is not known, at a projection behind packed attention."""
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(decoder(transformers), config).train()


def prepared_for_few_bits() -> Any:
    options = {"use_reentrant": False}
    model = peft.prepare_model_for_kbit_training(
        decoder(transformers), gradient_checkpointing_kwargs=options
    )
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=list(TARGETS))
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).train()


def fine_tune(model: Any) -> Tensor:
    loss: Tensor = model(**TEXT, labels=TEXT["input_ids"]).loss
    return loss


def likelihood(model: Any) -> Tensor:
    words = model(**TEXT).logits[:, :-1].log_softmax(-1)
    chosen: Tensor = words.gather(-1, TEXT["input_ids"][:, 1:, None])
    return chosen.sum((1, 2))


def preference(margin: Tensor) -> Tensor:
    """Return the loss of direct preference optimisation, for a chosen and a rejected text."""
    return -F.logsigmoid(0.1 * (margin[0] - margin[1]))


def prefer_to_the_base(model: Any) -> Tensor:
    policy = likelihood(model)
    with torch.no_grad(), model.disable_adapter():
        reference = likelihood(model)
    return preference(policy - reference)


def prefer_to_another_adapter(model: Any) -> Tensor:
    """Take another adapter between the forward and the backward pass of the policy's."""
    model.set_adapter("default")
    policy = likelihood(model)
    model.set_adapter("other")
    with torch.no_grad():
        reference = likelihood(model)
    model.set_adapter("default")
    return preference(policy - reference)


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "fine-tuning": (adapted, fine_tune),
    "values only": (lambda: adapted(target_modules=["q_proj", "v_proj"]), fine_tune),
    "output only": (lambda: adapted(target_modules=["o_proj"]), fine_tune),
    "another kind": (of_another_kind, fine_tune),
    "quantised base": (lambda: quantised(adapted()), fine_tune),
    "few bits": (prepared_for_few_bits, fine_tune),
    "base as reference": (adapted, prefer_to_the_base),
    "adapter as reference": (with_a_second, prefer_to_another_adapter),
}


def gradients(model: Any, run: Callable[[Any], Tensor]) -> Gradients:
    run(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_learns_as_without(program: str, level: str) -> None:
    build, run = PROGRAMS[program]
    expected = gradients(build(), run)
    model = build()
    vramx.manual_seed(0, rank=0)
    vramx.optimize(model, level)
    found = gradients(model, run)
    assert found.keys() == expected.keys()
    flat = [torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)]
    assert 0 < error(*flat) < INT8_NOISE


def test_values_of_frozen_projections_are_made_again_and_nothing_else_at_int8() -> None:
    model = quantised(adapted())
    vramx.optimize(model, "int8")
    fine_tune(model).backward()
    calls = {
        name: module.calls for name, module in model.named_modules() if hasattr(module, "calls")
    }
    again = {name for name, count in calls.items() if count == 2}
    assert again == {name for name in calls if ".v_proj." in name}
    assert set(calls.values()) == {1, 2}


# -- Bytes -----------------------------------------------------------------------------------------


def kept(block: Any, **inputs: Any) -> int:
    """Return the bytes that a call leaves behind, by the allocator's own count.

    Hooks that count would have values kept which are made again.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        y = block(**inputs)
    found = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    y.sum().backward()
    return int(found) - y.nbytes


@pytest.mark.parametrize(
    ("level", "rate", "least"),
    [("int8", 0.0, 3.7), ("int8", 0.05, 4.7), ("recompute_mlp", 0.0, 9.0)],
)
def test_adapted_llama_block_keeps_so_many_times_less_than_eager(
    level: str, rate: float, least: float
) -> None:
    block, call = llama_block()
    block.requires_grad_(False)
    adapters = peft.LoraConfig(
        r=2, target_modules=list(TARGETS), init_lora_weights=False, lora_dropout=rate
    )
    peft.inject_adapter_in_model(adapters, block)
    for parameter in block.parameters():
        parameter.data = parameter.data.bfloat16()
    kept(block, **call)  # the gradients
    eager = kept(block, **call)
    vramx.optimize(block, level)
    kept(block, **call)
    assert eager / kept(block, **call) > least
