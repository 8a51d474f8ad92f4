"""The head and the loss of a language model in vramx.optimize, on a model without transformers."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from language_model_tools import (
    CLASSES,
    TOKENS,
    call_of,
    language_model,
    largest_error,
    sizes_made,
    stand_in,
)
from optimize_tools import ROUNDING, optimised_copy
from torch import nn

import vramx
from vramx import errors
from vramx.errors import VramxWarning
from vramx.nn.families.bare import bare_model
from vramx.nn.logits import Logits
from vramx.nn.loss_chunks import chunk_tokens

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "tied": {"tied": True},
    "capped": {"cap": 2.0},
    "scaled": {"scale": 0.25, "bias": True},
    "scaled and capped": {"scale": 3.0, "cap": 1.5},
}
SHIFTED = torch.randint(3, CLASSES, (2, TOKENS), generator=torch.Generator().manual_seed(2))
OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "number of items": {"num_items_in_batch": 17},
    "tensor of items": {"num_items_in_batch": torch.tensor(17)},
    "shifted": {"shift_labels": SHIFTED},
    "ignored": {"ignore_index": 7},
    "tuple": {"return_dict": False},
}


@pytest.fixture(autouse=True)
def told_anew() -> None:
    errors._said.clear()


def logits_of(result: Any) -> Any:
    return result[1] if isinstance(result, tuple) else result.logits


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_originals(kind: str, option: str) -> None:
    original, call = language_model(**KINDS[kind]), {**call_of(), **OPTIONS[option]}
    if option == "ignored":  # instead of -100, which is no class
        call["labels"] = call["labels"].where(call["labels"] >= 0, call["ignore_index"])
    model = copy.deepcopy(original)
    report = vramx.optimize(model, "keep")
    assert [row.name for row in report.swapped] == ["lm_head"]
    assert largest_error(model, original, call) < ROUNDING
    logits = logits_of(model(**call))
    assert isinstance(logits, Logits)
    assert not logits.is_made


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
def test_tokens_that_are_kept_have_their_loss() -> None:
    original = language_model()
    model = optimised_copy(original, "keep")
    call = {**call_of(), "logits_to_keep": 4, "shift_labels": SHIFTED[:, -4:].contiguous()}
    assert largest_error(model, original, call) < ROUNDING
    wrong = {**call_of(), "logits_to_keep": 4}
    for each in (model, original):  # labels of other tokens: the original's error
        with pytest.raises((ValueError, RuntimeError)):
            each(**wrong)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    rows, tokens, classes = 3, 1000, 1000
    model, call = language_model(vocab_size=classes), call_of(rows, tokens, classes)
    chunk = chunk_tokens(torch.empty(rows * tokens, 32), model.lm_head.weight, 0)
    assert chunk < rows * tokens
    with sizes_made() as sizes:
        model(**call).loss.backward()
    assert max(sizes) == rows * tokens * classes  # what the mode sees without vramx
    vramx.optimize(model, "keep")
    with sizes_made() as sizes:
        model(**call).loss.backward()
    assert max(sizes) == chunk * classes


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize("how", ["eval", "no_grad", "no labels", "frozen"])
def test_calls_that_do_not_train_are_the_originals(how: str) -> None:
    original, call = language_model(), call_of()
    model = optimised_copy(original)
    if how == "no labels":
        del call["labels"]
    for each in (model, original):
        each.train(how != "eval").requires_grad_(how != "frozen")
    with torch.set_grad_enabled(how != "no_grad"):
        found, expected = model(**call), original(**call)
    if how != "frozen":
        assert type(found.logits) is torch.Tensor
    assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
    assert torch.allclose(found.logits + 0, expected.logits, rtol=ROUNDING, atol=ROUNDING)


def test_labels_by_position_are_seen() -> None:
    model, call = language_model(), call_of()
    vramx.optimize(model)
    result = model(call["input_ids"], call["labels"])
    assert isinstance(result.logits, Logits)


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = vramx.optimize(model, "keep")
    (row,) = report.swapped
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


def own_loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


class Derived(stand_in().StandInForCausalLM):  # type: ignore[misc]
    pass


class Forwarding(stand_in().StandInForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def _hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, result: result + 0)


def _adapt(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head, nn.Identity())


def _own_loss(model: Any) -> None:
    model.loss_function = own_loss


def _own_forward(model: Any) -> None:
    model.forward = types.MethodType(stand_in().StandInForCausalLM.forward, model)


CHANGES = {"hooks": _hook, "adapter": _adapt, "loss": _own_loss}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook, "no plain Linear"),
        (_adapt, "no plain Linear"),
        (_own_loss, "own_loss"),
        (_own_forward, "replaced"),
        (lambda model: setattr(model, "__class__", Derived), "derived from StandInForCausalLM"),
        (lambda model: setattr(model, "__class__", Forwarding), "derived from StandInForCausalLM"),
        (lambda model: setattr(model.config, "penalty", 0.1), "needs the logits"),
        (
            lambda model: setattr(model.config, "vocab_size", None),
            "cannot be tried: TypeError",
        ),
    ],
)
def test_what_is_not_known_is_left_with_a_reason(change: Any, reason: str) -> None:
    model = language_model()
    change(model)
    with pytest.warns(VramxWarning, match=reason):
        report = vramx.optimize(model)
    (row,) = (row for row in report.rows if row.name == "lm_head")
    assert row.done == "left"
    assert reason in row.reason
    if model.config.vocab_size is not None:
        assert type(model(**call_of()).logits) is torch.Tensor


def test_head_whose_level_is_left_is_left_without_a_word() -> None:
    model = language_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = vramx.optimize(model, {"lm_head": "left", "*": "int8"})
    assert not report.swapped
    assert type(model(**call_of()).logits) is torch.Tensor


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_afterwards_is_as_the_original_changed(name: str) -> None:
    original = language_model()
    model = optimised_copy(original)
    for each in (model, original):
        CHANGES[name](each)
    with pytest.warns(VramxWarning, match="makes its logits"):
        result = model(**call_of())
    assert type(result.logits) is torch.Tensor
    assert "made its logits: its " in vramx.report(model).rows[0].effect
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        assert largest_error(model, original, call_of()) == 0


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch"])
def test_copies_make_no_logits_and_train_apart(how: str, monkeypatch: Any) -> None:
    if "transformers" not in sys.modules:  # pickle asks for the package of the class
        monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    model, call = language_model(), call_of()
    vramx.optimize(model, "keep")
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    expected = copy.deepcopy(other)
    vramx.restore(expected)
    assert isinstance(other(**call).logits, Logits)
    assert largest_error(other, expected, call) < ROUNDING
    assert abs(model(**call).loss - other(**call).loss) > ROUNDING


def test_restored_model_is_the_original_to_the_bit() -> None:
    original, call = language_model(), call_of()
    model = copy.deepcopy(original)
    for _ in range(2):  # again: once all the same
        vramx.optimize(model)
    assert list(model.state_dict()) == list(original.state_dict())
    done = {row.name: row.done for row in vramx.report(model).rows}
    assert done == {"": "loss without logits", "lm_head": "logits not made in training"}
    assert len(vramx.restore(model)) == 2
    assert largest_error(model, original, call) == 0
    assert type(model(**call).logits) is torch.Tensor


def test_a_trial_changes_no_random_number() -> None:
    model = language_model(hidden_size=48)  # of sizes that were not tried
    state = torch.get_rng_state()
    vramx.optimize(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_under_autocast_are_the_originals_to_its_rounding() -> None:
    original, call = language_model(), call_of()
    model = optimised_copy(original, "keep")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model(**call), original(**call)
    assert found.logits.dtype == expected.logits.dtype
    assert not found.logits.is_made
    # Of sums of some tens of terms, each rounded to bfloat16 in either way.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert largest_error(model, original, call) < 8 * torch.finfo(torch.bfloat16).eps
