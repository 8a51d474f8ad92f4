"""The loss of models of transformers in vramx.optimize: no logits in training, the same all around.

What programs do with such models is in test_nn_head_programs.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from head_models import (
    CLASSES,
    IDS,
    KINDS,
    LAYER,
    WIDTH,
    made,
    model_of,
    said,
    transformers,
)
from language_model_tools import call_of, gradients, largest_error, sizes_made, told_anew
from optimize_tools import DECODERS, ROUNDING, any_model, optimised_copy
from record_tools import recorder
from torch import Tensor

import vramx
from vramx.errors import VramxWarning
from vramx.nn import loss_chunks
from vramx.nn.logits import Logits

__all__ = ["said", "told_anew"]  # fixtures
pytestmark = pytest.mark.usefixtures("seeded", "told_anew")

# Of the gradient of all parameters, as the promise for int8 is.
INT8_COSINE = 0.9993


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_originals(
    kind: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Without logits, with nothing that transformers has to say, and per item in a batch, too."""
    monkeypatch.setattr(loss_chunks, "_TOKENS_OF_CHUNK", 128)
    original, call = made(kind)
    model = copy.deepcopy(original)
    said.clear()
    report = vramx.optimize(model, "keep")
    assert not said
    assert not [row for row in report.left if row.module == type(original).__name__]
    with sizes_made() as sizes:
        found = model(**call)
        found.loss.backward()
    with sizes_made() as with_logits:
        original(**call).loss.backward()
    size = found.logits.numel()
    assert max(with_logits) == size  # what the mode sees without vramx
    assert max(sizes) < size
    assert isinstance(found.logits, Logits)
    assert largest_error(model, original, call) < ROUNDING
    given = {**call, "num_items_in_batch": torch.tensor(17)}
    if takes(original, given):
        assert largest_error(model, original, given) < ROUNDING


def takes(model: Any, call: dict[str, Any]) -> bool:
    """Tell whether a model of this release takes a call."""
    try:
        model(**call)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_at_int8_point_where_the_originals_do(kind: str) -> None:
    original, call = made(kind)
    (_, found), (_, exact) = (
        gradients(model, call) for model in (optimised_copy(original, "int8"), original)
    )
    assert found.keys() == exact.keys()
    both = (torch.cat([each[name].flatten() for name in exact]) for each in (found, exact))
    assert torch.nn.functional.cosine_similarity(*both, dim=0) > INT8_COSINE


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_the_restored_model_are_the_originals(kind: str) -> None:
    original, call = made(kind)
    model = optimised_copy(original, "keep")
    for each in (model, original):
        each.eval()
    found, expected = model(**call), original(**call)
    assert type(found.logits) is Tensor
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    vramx.restore(model)
    assert largest_error(model.train(), original.train(), call) == 0


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "masked"])
def test_generated_words_are_the_originals(kind: str) -> None:
    original, call = made(kind)
    model = optimised_copy(original.eval(), "keep")
    given = {name: value for name, value in call.items() if name != "labels"}
    asked = {**given, "max_new_tokens": 3, "do_sample": False}
    try:
        words = original.generate(**asked)
    except (IndexError, RuntimeError):
        pytest.skip("this release's model itself cannot")
    assert torch.equal(model.generate(**asked), words)


def test_a_loss_that_needs_the_logits_is_named_with_the_reason() -> None:
    model = model_of(
        "ProphetNetForConditionalGeneration", vocab_size=CLASSES, hidden_size=WIDTH,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_encoder_layers=1, num_decoder_layers=1,
        num_encoder_attention_heads=2, num_decoder_attention_heads=2, **IDS
    )  # fmt: skip
    with pytest.warns(VramxWarning, match="ProphetNet.* its loss needs the logits themselves"):
        report = vramx.optimize(model, "keep")
    (row,) = (row for row in report.rows if row.name == "lm_head")
    assert (row.done, row.reason) == ("left", "its loss needs the logits themselves")


def test_a_head_that_a_model_does_not_tell_is_named() -> None:
    sizes = {**LAYER, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50}
    crossed = {f"cross_{name}": size for name, size in sizes.items() if name != "vocab_size"}
    model = model_of(
        "DiaForConditionalGeneration", encoder_config=sizes, delay_pattern=[0, 1, 2],
        decoder_config={**sizes, **crossed, "num_channels": 3, "max_position_embeddings": 64}
    )  # fmt: skip
    with pytest.warns(VramxWarning, match="Dia.* get_output_embeddings.. gives no head"):
        report = vramx.optimize(model, "keep")
    (row,) = (row for row in report.rows if row.module == "DiaForConditionalGeneration")
    assert row.done == "left"


OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "number of items": {"num_items_in_batch": 17},
    "tensor of items": {"num_items_in_batch": torch.tensor(17)},
    "shifted": {"shift_labels": call_of()["input_ids"]},
    "tokens": {"logits_to_keep": 4, "shift_labels": call_of()["input_ids"][:, :4].contiguous()},
    "tuple": {"return_dict": False},
}


def language_model(name: str) -> Any:
    return any_model(transformers, name)[0]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", [*DECODERS, "gpt2"])
def test_options_of_the_loss_are_the_originals(name: str, option: str) -> None:
    original, call = language_model(name), {**call_of(), **OPTIONS[option]}
    model = optimised_copy(original, "keep")
    assert largest_error(model, original, call) < ROUNDING
    result = model(**call)
    logits = result[1] if isinstance(result, tuple) else result.logits
    assert isinstance(logits, Logits)
    assert not logits.is_made


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_recorded_step_makes_no_logits(name: str, tmp_path: Path) -> None:
    model = language_model(name)
    vramx.optimize(model, "int8")
    with recorder(tmp_path / "run.pickle", CpuHistory(), model):
        assert not model(**call_of()).logits.is_made


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_predicted_step_makes_no_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = language_model(name), call_of()
    stands, makes = list[Any](), list[Any]()
    stand, make = Logits.of, Logits.made
    monkeypatch.setattr(Logits, "of", lambda *args: (stands.append(1), stand(*args))[1])
    monkeypatch.setattr(Logits, "made", lambda each: (makes.append(1), make(each))[1])

    def step() -> None:
        model(**call).loss.backward()

    vramx.predict(step, levels=["int8"], policies="live", device="cpu", steps=1)
    assert (len(stands), len(makes)) == (1, 0)
