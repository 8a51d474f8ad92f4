"""vramx.optimize on models of transformers and timm, and below checkpointing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optimize_tools import (
    DECODERS,
    HUGGING_FACE,
    INT8_NOISE,
    LAYERS,
    NEW_IN_5,
    ROUNDING,
    assert_computes,
    cache_word,
    decoder,
    error,
    fused_calls,
    gradient_of,
    hugging_face,
    optimised_copy,
    padded,
    result_of,
    timm_vit,
    twin,
)

import vramx
from vramx import errors
from vramx.errors import VramxError, VramxWarning
from vramx.nn.families import decoder as decoder_family

transformers = pytest.importorskip("transformers")
VERSION = transformers.__version__
# What is of a known family, and of another kind in this release.
UNKNOWN = [name for name in NEW_IN_5 if VERSION.startswith("4.")]


pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_transformers_compute_what_their_originals_do(name: str, level: str) -> None:
    original, inputs = hugging_face(transformers, name)
    model = twin(original)
    report = vramx.optimize(model, level)
    others = [row.name for row in report.swapped if row.name.endswith(("norm", "lm_head"))]
    assert len(others) == 2 * (name in DECODERS) + (name == "gpt2")
    assert len(report.swapped) - len(others) == LAYERS
    assert_computes(model, original, inputs, level, LAYERS)
    vramx.restore(model)
    assert torch.equal(gradient_of(model, inputs), gradient_of(original, inputs))
    assert list(model.state_dict()) == list(original.state_dict())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padded_batches_are_masked_as_in_the_original(name: str, implementation: str) -> None:
    original, inputs = hugging_face(transformers, name)
    original.set_attn_implementation(implementation)
    model = optimised_copy(original)
    assert_computes(model, original, padded(inputs), "int8", LAYERS)
    y = result_of(model, padded(inputs))
    assert error(y, result_of(original, inputs)) > ROUNDING or name == "llama"


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp", "recompute_all"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_training_pass_without_gradients_is_that_with_gradients(name: str, level: str) -> None:
    """To the bit: a ratio of the two is to be 1."""
    original, inputs = hugging_face(transformers, name)
    model, found = optimised_copy(original, level), []
    for with_gradients in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(with_gradients), fused_calls() as calls:
            found.append(result_of(model, inputs))
        assert len(calls) == LAYERS
    assert torch.equal(*found)


@pytest.mark.parametrize("level", ["int8", "recompute_all"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transforms_of_torch_differentiate_the_original(name: str, level: str) -> None:
    original, inputs = hugging_face(transformers, name)
    model = optimised_copy(original, level)
    inputs |= {"labels": inputs["input_ids"]} if name in DECODERS else {}
    found = []
    for each in (model, original):
        parameters = {key: value.detach() for key, value in each.named_parameters()}

        def loss(values: dict[str, Any], each: Any = each) -> torch.Tensor:
            torch.manual_seed(0)  # of dropout
            y = torch.func.functional_call(each, values, (), dict(inputs))
            return y.loss if "labels" in inputs else y[0].square().mean()

        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            along = torch.func.jvp(loss, (parameters,), (parameters,))[1]
        found.append({"": along, **torch.func.grad(loss)(parameters)})
    for key, gradient in found[1].items():
        torch.testing.assert_close(found[0][key], gradient, msg=key)


def test_block_whose_class_is_changed_on_top_is_fused_still(monkeypatch: Any) -> None:
    # fully_shard() makes a subclass, named otherwise, for each module that it is given.
    original, inputs = hugging_face(transformers, "llama")
    model = optimised_copy(original)
    expected = result_of(original, inputs)
    for layer in model.model.layers:
        layer.__class__ = type("Sharded", (type(layer),), {"__module__": __name__})
    called: list[int] = []
    feed = decoder_family.feed_forward
    monkeypatch.setattr(
        decoder_family, "feed_forward", lambda *args: called.append(1) or feed(*args)
    )
    with fused_calls() as calls:
        assert error(result_of(model, inputs), expected) < ROUNDING
    assert len(calls) == len(called) == LAYERS


def test_windows_of_mistral_are_honoured() -> None:
    original = decoder(transformers, "mistral", sliding_window=4)
    wide = decoder(transformers, "mistral", sliding_window=None)
    inputs = hugging_face(transformers, "mistral")[1]
    model = optimised_copy(original)
    assert_computes(model, original, inputs, "int8")
    assert error(result_of(model, inputs), result_of(wide, inputs)) > 100 * ROUNDING


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_dropout_of_models_is_as_strong_as_the_originals(name: str) -> None:
    model, inputs = hugging_face(transformers, name, dropout=0.3)
    differences = []
    for change in (vramx.optimize, vramx.restore):
        change(model)
        runs = [result_of(model, inputs).detach() for _ in range(3)]
        differences.append(error(runs[0], runs[1]) + error(runs[1], runs[2]))
    # Norms of differences of runs with independent masks; a factor of 1 / (1 - p) too much or too
    # little, or dropout that is missing in one place of three, changes them by more than a third.
    assert 0.75 < differences[0] / differences[1] < 1.33


def test_cache_in_training_is_filled_as_by_the_original() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = optimised_copy(original)
    call = {**inputs, "use_cache": True}
    assert_computes(model, original, call, "int8", LAYERS)
    found, expected = model(**call), original(**call)
    with torch.no_grad():
        model = optimised_copy(original, "recompute_all")
        unread = model(**call)
        tokens = inputs["input_ids"][:, :4]
        texts = [each.generate(tokens, max_new_tokens=8) for each in (model, original)]
    caches = [out[cache_word(original)] for out in (found, expected, unread)]
    assert {each.get_seq_length() for each in caches} == {inputs["input_ids"].shape[1]}
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputed_blocks_leave_a_new_cache_empty_and_say_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_said", set())
    original, inputs = hugging_face(transformers, name)
    model = optimised_copy(original, "recompute_all")
    with pytest.warns(VramxWarning, match="use_cache=False"):
        found = model(**inputs, use_cache=True)
    word = cache_word(original)
    assert found[word].get_seq_length() == 0
    assert error(found[0], original(**inputs)[0]) < ROUNDING
    for again in (model, model.eval()):
        with pytest.raises(VramxError, match="left empty"):
            again(**inputs, **{word: copy.deepcopy(found[word])})
    model.train()
    # What a cache has already is part of the result: such a call is not recomputed.
    with torch.no_grad():
        cache = original(**inputs, use_cache=True)[word]
    with pytest.warns(VramxWarning, match="filled cache") as said:
        found = model(**inputs, **{word: copy.deepcopy(cache)})
    assert [each.category for each in said].count(VramxWarning) == 1
    assert error(found[0], original(**inputs, **{word: copy.deepcopy(cache)})[0]) < ROUNDING


def test_torch_fx_traces_the_original_through_recomputed_blocks() -> None:
    model = timm_vit()
    pixels = torch.randn(2, 3, 16, 16)
    expected = model(pixels)
    vramx.optimize(model, "recompute_all")
    assert error(torch.fx.symbolic_trace(model)(pixels), expected) < ROUNDING


def test_generation_is_the_originals_to_the_token() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = optimised_copy(original)
    call = {**inputs, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.eval().generate(**call), original.eval().generate(**call))


def test_attention_weights_are_returned_where_they_are_asked_for() -> None:
    original, inputs = hugging_face(transformers, "llama")
    original.set_attn_implementation("eager")
    model = optimised_copy(original)
    call = {**inputs, "output_attentions": True, "output_hidden_states": True}
    found, expected = model(**call), original(**call)
    assert len(found.attentions) == LAYERS
    assert error(found.attentions[1], expected.attentions[1]) < ROUNDING
    assert error(found.hidden_states[1], expected.hidden_states[1]) < ROUNDING


def test_saved_model_is_an_ordinary_one(tmp_path: Path) -> None:
    model, inputs = hugging_face(transformers, "llama")
    vramx.optimize(model)
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path)
    assert list(other.state_dict()) == list(model.state_dict())
    assert torch.equal(result_of(other.eval(), inputs), result_of(model.eval(), inputs))
    assert len(vramx.restore(other)) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_the_model_itself_works_on_top(reentrant: bool) -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = optimised_copy(original, "recompute_all")
    # A reentrant checkpoint needs an input that learns.
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with fused_calls() as calls:
        y = result_of(model, inputs)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        (y * weights).sum().backward()
    assert len(calls) == 2 * LAYERS  # for the result, and for what is saved
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert error(gradient, gradient_of(original, inputs)) < INT8_NOISE


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_checkpoints_of_the_model_drop_the_same_twice(
    name: str, reentrant: bool, verify: bool
) -> None:
    """A reentrant one computes its result without gradients, and what is saved with them."""
    original, inputs = hugging_face(transformers, name, dropout=0.3)
    model, found = optimised_copy(original, "keep", verify=verify), []
    model.enable_input_require_grads()
    for checkpoints in (True, False):
        model.gradient_checkpointing_disable()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(4)
        model.zero_grad()
        y = result_of(model, inputs)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert error(*found) < ROUNDING


@pytest.mark.parametrize("level", ["int8", "recompute_mlp"])
def test_nothing_is_packed_within_a_models_own_checkpoints(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_said", set())
    original, inputs = hugging_face(transformers, "llama")
    model = optimised_copy(original, {"model.layers.*": level})
    expected = gradient_of(original, inputs)
    assert error(gradient_of(model, inputs), expected) > 10 * ROUNDING
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.warns(
        VramxWarning, match=r"gradient_checkpointing_disable\(\), and .*'recompute_all'"
    ):
        gradient = gradient_of(model, inputs)
    assert error(gradient, expected) < ROUNDING


def test_compiled_model_has_no_break() -> None:
    original, inputs = hugging_face(transformers, "llama")
    compiled = torch.compile(optimised_copy(original), backend="aot_eager", fullgraph=True)
    assert_computes(compiled, original, {**inputs, "use_cache": False}, "int8")


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
@pytest.mark.parametrize("extras", [False, True])
def test_blocks_of_timm_compute_what_their_originals_do(level: str, extras: bool) -> None:
    original = timm_vit(**{"qk_norm": True, "init_values": 0.5} if extras else {})
    inputs = {"x": torch.randn(2, 3, 16, 16)}
    assert_computes(optimised_copy(original, level), original, inputs, level, LAYERS)
