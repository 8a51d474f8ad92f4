"""The head and the loss of a language model in vramx.optimize, on a model without transformers."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
import warnings
from collections.abc import Callable
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
    told_anew,
)
from optimize_tools import ROUNDING, optimised_copy
from torch import nn

import vramx
from vramx.errors import VramxWarning
from vramx.nn.logits import Logits
from vramx.nn.loss_chunks import chunk_tokens

__all__ = ["told_anew"]  # a fixture
pytestmark = pytest.mark.usefixtures("told_anew")

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
    result = model(**call)
    logits = result[1] if option == "tuple" else result.logits
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


def own_loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


def without_a_word(model: nn.Module, level: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return vramx.optimize(model, level)


class Derived(stand_in().StandInForCausalLM):  # type: ignore[misc]
    pass


class Forwarding(stand_in().StandInForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def _own_forward(model: Any) -> None:
    model.forward = types.MethodType(stand_in().StandInForCausalLM.forward, model)


def _setting(name: str, value: Any, of: str = "") -> Callable[[Any], None]:
    return lambda model: setattr(getattr(model, of) if of else model, name, value)


Changes = dict[str, tuple[Callable[[Any], Any], str]]
CHANGES: Changes = {
    "hooks": (
        lambda model: model.lm_head.register_forward_hook(lambda module, args, result: result + 0),
        "no plain Linear",
    ),
    "adapter": (
        lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head, nn.Identity())),
        "no plain Linear",
    ),
    "loss": (_setting("loss_function", own_loss), "own_loss"),
}
NOT_KNOWN: Changes = CHANGES | {
    "forward": (_own_forward, "replaced"),
    "class": (_setting("__class__", Derived), "derived from StandInForCausalLM"),
    "class's forward": (_setting("__class__", Forwarding), "derived from StandInForCausalLM"),
    "penalty": (_setting("penalty", 0.1, of="config"), "needs the logits"),
    "no size": (_setting("vocab_size", None, of="config"), "cannot be tried: TypeError"),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_is_not_known_is_left_with_a_reason(name: str) -> None:
    model = language_model()
    change, reason = NOT_KNOWN[name]
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
    assert not without_a_word(model, {"lm_head": "left", "*": "int8"}).swapped
    assert type(model(**call_of()).logits) is torch.Tensor


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_afterwards_is_as_the_original_changed(name: str) -> None:
    original = language_model()
    model = optimised_copy(original)
    for each in (model, original):
        CHANGES[name][0](each)
    with pytest.warns(VramxWarning, match="makes its logits"):
        result = model(**call_of())
    assert type(result.logits) is torch.Tensor
    assert "made its logits: its " in vramx.report(model).rows[0].effect
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        assert largest_error(model, original, call_of()) == 0


def through_a_file(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch": through_a_file,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_make_no_logits_and_train_apart(how: str, monkeypatch: Any) -> None:
    if "transformers" not in sys.modules:  # pickle asks for the package of the class
        monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    model, call = language_model(), call_of()
    vramx.optimize(model, "keep")
    other = COPIES[how](model)
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
        assert largest_error(model, original, call) < 8 * torch.finfo(torch.bfloat16).eps
