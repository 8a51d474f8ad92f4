"""A language model within another model: both know the head, and one of them computes the loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from language_model_tools import TOKENS, call_of, language_model, largest_error, stand_in, told_anew
from optimize_tools import ROUNDING
from test_nn_head import own_loss, without_a_word
from torch import nn

import vramx
from vramx.errors import VramxWarning
from vramx.nn.families.bare import bare_model

__all__ = ["told_anew"]  # a fixture
pytestmark = pytest.mark.usefixtures("told_anew")


@pytest.mark.parametrize("passes_labels", [True, False])
def test_a_model_within_another_needs_no_logits_whoever_computes_the_loss(
    passes_labels: bool,
) -> None:
    torch.manual_seed(0)
    original = stand_in().StandInEncoderDecoder(language_model(), passes_labels).train()
    call = {"pixels": torch.randn(2, TOKENS, 12), "labels": call_of()["labels"]}
    model = copy.deepcopy(original)
    report = vramx.optimize(model, "keep")
    (row,) = report.swapped
    assert row.name == "decoder.lm_head"
    assert "StandInEncoderDecoder and StandInForCausalLM" in row.reason
    assert largest_error(model, original, call) < ROUNDING
    assert not model(**call).logits.is_made
    inner = {"input_ids": call_of()["input_ids"], "labels": call["labels"]}
    assert not model.decoder(**inner).logits.is_made
    assert len(vramx.restore(model)) == 3
    assert largest_error(model, original, call) == 0


def test_a_model_around_another_that_makes_logits_is_named() -> None:
    model = stand_in().StandInEncoderDecoder(language_model()).train()
    model.loss_function = own_loss
    with pytest.warns(VramxWarning, match=r"StandInEncoderDecoder .*own_loss is not known"):
        report = vramx.optimize(model, "keep")
    (row,) = report.swapped
    assert "StandInForCausalLM, without logits; StandInEncoderDecoder is as it was" in row.reason
    call = {"pixels": torch.randn(2, TOKENS, 12), "labels": call_of()["labels"].clamp(min=0)}
    assert type(model(**call).logits) is torch.Tensor


def test_a_model_of_the_programs_own_around_another_is_no_reason_for_a_word() -> None:
    class Own(nn.Module):
        def __init__(self, decoder: Any) -> None:
            super().__init__()
            self.decoder = decoder

        def get_output_embeddings(self) -> nn.Module:
            return self.decoder.get_output_embeddings()

        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            return self.decoder(input_ids=input_ids, labels=labels)

    model = Own(language_model()).train()
    (row,) = without_a_word(model, "keep").swapped
    assert row.reason == "the loss of StandInForCausalLM, without logits"
    assert not model(**call_of()).logits.is_made


def test_a_bare_model_has_nothing_of_the_models_memory() -> None:
    model = stand_in().StandInEncoderDecoder(language_model(bias=True)).train()
    before = copy.deepcopy(model.state_dict())
    bare, call = bare_model(model)
    assert type(bare) is type(model)
    assert type(bare.decoder) is type(model.decoder)
    mine = {id(part) for part in (*model.modules(), *model.parameters(), model.config)}
    assert not mine & {id(part) for part in (*bare.modules(), *bare.parameters(), bare.config)}
    assert sorted(call) == ["labels", "pixels"]
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
