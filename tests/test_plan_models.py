"""vramx.plan on models of transformers, as the installed release makes and calls them."""

from __future__ import annotations

import copy
from typing import Any

import plan_tools
import pytest
import torch
from language_model_tools import sizes_made
from optimize_tools import HIDDEN, INT8_NOISE, LAYERS, decoder, error, hugging_face
from plan_tools import EXACT, peak_of_loop

import vramx
from vramx.errors import InvalidValueError
from vramx.nn.logits import Logits
from vramx.nn.loss_chunks import chunk_tokens

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gradient(model: Any) -> torch.Tensor:
    return plan_tools.gradient(model, lambda: model(**batch()).loss)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_plan_of_a_model_trains_as_the_model(name: str) -> None:
    model: Any = hugging_face(transformers, name)[0]
    for part in model.modules():  # a mask of their own each time: no gradients to compare
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    exact = gradient(model)
    plan = vramx.plan(model, batch(), budget="smallest", levels=["recompute_all"]).apply()
    assert list(plan.words.values()) == ["recompute_all"] * LAYERS
    assert isinstance(model(**batch()).logits, Logits)  # its loss makes none
    assert error(gradient(model), exact) < INT8_NOISE
    plan.undo()
    assert torch.equal(gradient(model), exact)


def test_a_planned_model_makes_no_tensor_as_large_as_its_logits() -> None:
    model: Any = decoder(transformers)
    model.resize_token_embeddings(1000)
    ids = torch.randint(3, 50, (44, 50), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "labels": ids}
    plan = vramx.plan(model, call, levels=["recompute_all"]).apply()
    with sizes_made() as sizes:
        model(**call).loss.backward()
    plan.undo()
    chunk = chunk_tokens(torch.empty(ids.numel(), HIDDEN), model.lm_head.weight, 0)
    assert max(sizes) == chunk * 1000 < ids.numel() * 1000


def test_a_cache_that_the_config_asks_for_is_off_while_the_plan_is_applied() -> None:
    model: Any = decoder(transformers)
    assert model.config.use_cache is True
    plan = vramx.plan(model, batch(), levels=["int8"])
    assert model.config.use_cache is True
    assert "caches of keys and values are off while the plan is applied" in str(plan)
    assert "model.config.use_cache = False" in plan.code
    plan.apply()
    assert model(**batch()).past_key_values is None
    assert "model.config.use_cache = False" in plan.code
    plan.undo()
    assert model.config.use_cache is True


def test_a_cache_that_the_step_itself_asks_for_is_an_error() -> None:
    model = decoder(transformers)
    with pytest.raises(InvalidValueError, match="a cache that training has no use for"):
        vramx.plan(model, {**batch(), "use_cache": True}, levels=["int8"])


def test_the_printed_code_does_what_apply_does() -> None:
    model = decoder(transformers)
    plan = vramx.plan(model, batch(), "smallest", levels=["recompute_all", "int8"])
    applied = str(vramx.report(plan.apply() and model))
    plan.undo()
    exec(plan.code, {"vramx": vramx, "model": model})
    assert str(vramx.report(model)) == applied
    assert "loss without logits" in applied


def peak_of_copy(model: Any) -> int:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        model(**batch()).loss.backward()

    return peak_of_loop(model, step, optimizer)


def adapted() -> Any:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    model = peft.get_peft_model(decoder(transformers), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros: adapters would have no gradient to compare
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def experts() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, **heads, vocab_size=50, num_local_experts=4, pad_token_id=0
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).train()


@pytest.mark.parametrize("make", [adapted, experts])
def test_adapters_and_experts_are_planned_and_keep_their_budget_in_a_loop(make: Any) -> None:
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    widest = vramx.plan(
        model, batch(), levels=["left", "int8", "recompute_all"], optimizer=optimizer
    )
    assert len(widest.words) == LAYERS
    smallest = widest.with_budget(batch(), "smallest")
    for plan in (widest, smallest):
        plan.apply()
        peak = peak_of_copy(model)
        plan.undo()
        assert peak <= plan.measured_bytes * (1 + EXACT)
    if make is adapted:
        exact = gradient(model)
        smallest.apply()
        assert error(gradient(model), exact) < INT8_NOISE
