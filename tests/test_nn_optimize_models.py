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
    cache_word,
    decoder,
    error,
    fused_calls,
    gradient_of,
    hugging_face,
    llama_block,
    optimised_copy,
    result_of,
    timm_vit,
    twin,
)

import vramx
from vramx import errors
from vramx.errors import VramxError, VramxWarning
from vramx.nn import products
from vramx.nn.families import attention
from vramx.nn.families import decoder as decoder_family

transformers = pytest.importorskip("transformers")
VERSION = transformers.__version__
# What is of a known family, and of another kind in this release.
UNKNOWN = [name for name in NEW_IN_5 if VERSION.startswith("4.")]


@pytest.fixture(autouse=True)
def seed() -> None:
    vramx.manual_seed(0, rank=0)
    torch.manual_seed(0)


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_transformers_compute_what_their_originals_do(name: str, level: str) -> None:
    original, inputs = hugging_face(transformers, name)
    model = twin(original)
    report = vramx.optimize(model, level)
    with fused_calls() as calls:
        gradient = gradient_of(model, inputs)
    others = [row.name for row in report.swapped if row.name.endswith(("norm", "lm_head"))]
    assert len(others) == 2 * (name in DECODERS) + (name == "gpt2")
    assert len(calls) == len(report.swapped) - len(others) == LAYERS
    assert error(result_of(model, inputs), result_of(original, inputs)) < ROUNDING
    bound = ROUNDING if level == "keep" else INT8_NOISE
    exact = gradient_of(original, inputs)
    assert error(gradient, exact) < bound
    vramx.restore(model)
    assert torch.equal(gradient_of(model, inputs), exact)
    assert list(model.state_dict()) == list(original.state_dict())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padded_batches_are_masked_as_in_the_original(name: str, implementation: str) -> None:
    original, inputs = hugging_face(transformers, name)
    original.set_attn_implementation(implementation)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -5:] = 0
    padded = {**inputs, "attention_mask": mask}
    model = optimised_copy(original)
    with fused_calls() as calls:
        y = result_of(model, padded)
    assert len(calls) == LAYERS
    assert error(y, result_of(original, padded)) < ROUNDING
    assert error(y, result_of(original, inputs)) > ROUNDING or name == "llama"


@pytest.mark.parametrize("level", ["int8", "recompute_all"])
def test_a_mask_and_shared_heads_do_not_meet_in_torchs_attention(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """No kernel takes both: torch would make the scores of all pairs of tokens."""
    model, inputs = hugging_face(transformers, "llama")
    model.set_attn_implementation("sdpa")
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -5:] = 0
    attend, both = torch.nn.functional.scaled_dot_product_attention, []

    def seen(*args: Any, **kwargs: Any) -> Any:
        masked = kwargs.get("attn_mask") is not None or any(a is not None for a in args[3:4])
        both.append(masked and kwargs.get("enable_gqa", False))
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    vramx.optimize(model, level)
    gradient_of(model, {**inputs, "attention_mask": mask})
    assert not any(both)
    assert len(both) >= (0 if level == "int8" else 2 * LAYERS)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_long_sequences_go_through_some_heads_at_a_time(
    name: str, masked: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(products, "_TILE_ROWS", 4)
    groups: list[Any] = []
    monkeypatch.setattr(
        decoder_family,
        "attend_in_groups",
        lambda *of: groups.append(attention.attend_in_groups(*of)) or groups[-1],
    )
    original, inputs = hugging_face(transformers, name)
    if masked:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :3] = 0
    model = twin(original)
    vramx.optimize(model, "recompute_all")
    gradient = gradient_of(model, inputs)
    # In both passes, and not where a kind of block is compared with its original first.
    assert sum(each is not None for each in groups) == 2 * LAYERS
    assert error(result_of(model, inputs), result_of(original, inputs)) < ROUNDING
    assert error(gradient, gradient_of(original, inputs)) < INT8_NOISE


def test_long_sequences_meet_biases_of_every_projection(monkeypatch: Any) -> None:
    monkeypatch.setattr(products, "_TILE_ROWS", 4)
    config = hugging_face(transformers, "llama")[0].config
    config.attention_bias = config.mlp_bias = True
    original, inputs = transformers.LlamaForCausalLM(config), hugging_face(transformers, "llama")[1]
    model = twin(original)
    vramx.optimize(model, "recompute_all")
    assert error(gradient_of(model, inputs), gradient_of(original, inputs)) < INT8_NOISE


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_autocast_leaves_the_residuals_of_long_sequences_in_their_type(
    name: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(products, "_TILE_ROWS", 4)
    original, inputs = hugging_face(transformers, name)
    model = twin(original)
    vramx.optimize(model, "recompute_all")
    types: list[Any] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _module, _inputs, y: types.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        gradient = gradient_of(model, inputs)
        exact = gradient_of(original, inputs)
    assert set(types) == {torch.float32}
    assert error(gradient, exact) < 2 * INT8_NOISE


@pytest.mark.parametrize("level", ["int8", "recompute_all"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transforms_of_torch_differentiate_the_original(name: str, level: str) -> None:
    original, inputs = hugging_face(transformers, name)
    model = twin(original)
    vramx.optimize(model, level)
    inputs |= {"labels": inputs["input_ids"]} if name in DECODERS else {}
    found = []
    for each in (model, original):
        each.train()
        parameters = {key: value.detach() for key, value in each.named_parameters()}

        def loss(values: dict[str, Any], each: Any = each) -> torch.Tensor:
            torch.manual_seed(0)  # of dropout
            y = torch.func.functional_call(each, values, (), dict(inputs))
            return y.loss if "labels" in inputs else y[0].square().mean()

        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            tangents = (parameters,)
            along = torch.func.jvp(loss, (parameters,), tangents)[1]
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
    y = result_of(model, inputs)
    assert error(y, result_of(original, inputs)) < ROUNDING
    assert error(y, result_of(wide, inputs)) > 100 * ROUNDING


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_dropout_of_models_is_as_strong_as_the_originals(name: str) -> None:
    model, inputs = hugging_face(transformers, name, dropout=0.3)
    differences = []
    for optimised in (True, False):
        if optimised:
            vramx.optimize(model)
        else:
            vramx.restore(model)
        runs = [result_of(model, inputs).detach() for _ in range(3)]
        differences.append(error(runs[0], runs[1]) + error(runs[1], runs[2]))
    # Norms of differences of runs with independent masks; a factor of 1 / (1 - p) too much or too
    # little, or dropout that is missing in one place of three, changes them by more than a third.
    assert 0.75 < differences[0] / differences[1] < 1.33


# Bytes for an element that probes take, of 2 bytes each and fewer than ten.
PROBES = 20 / (512 * 128)


def test_llama_block_keeps_the_bytes_of_its_packs() -> None:
    block, bytes_kept = llama_block(transformers)
    # 134 bytes for 128 elements: of two norms' inputs, values, and a gated unit's two. q and k are
    # in bfloat16, and each norm keeps a float for each token.
    packed, of_norms = 134 / 128, 2 * 4 / 512
    attended = (2 + 1 / 4) * packed + 2 * (1 + 1 / 4) + of_norms
    assert bytes_kept() > 45
    vramx.optimize(block)
    assert bytes_kept() == pytest.approx(attended + 7 * packed, abs=PROBES)
    vramx.optimize(block, "recompute_mlp")
    assert bytes_kept() == pytest.approx(attended, abs=PROBES)


def test_cache_in_training_is_filled_as_by_the_original() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = optimised_copy(original)
    with fused_calls() as calls:
        found = model(**inputs, use_cache=True)
    expected = original(**inputs, use_cache=True)
    assert len(calls) == LAYERS
    assert error(found[0], expected[0]) < ROUNDING
    lengths = {out[cache_word(original)].get_seq_length() for out in (found, expected)}
    assert lengths == {inputs["input_ids"].shape[1]}


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
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    found = model.eval().generate(**inputs, **options)
    assert torch.equal(found, original.eval().generate(**inputs, **options))


def test_attention_weights_are_returned_where_they_are_asked_for() -> None:
    original, inputs = hugging_face(transformers, "llama")
    original.set_attn_implementation("eager")
    model = optimised_copy(original)
    found = model(**inputs, output_attentions=True, output_hidden_states=True)
    expected = original(**inputs, output_attentions=True, output_hidden_states=True)
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
    # Once with gradients for each block, and once before unless that was without.
    assert len(calls) == LAYERS * (1 if reentrant else 2)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert error(gradient, gradient_of(original, inputs)) < INT8_NOISE


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
    with pytest.warns(VramxWarning, match=r"gradient_checkpointing_disable\(\)"):
        gradient = gradient_of(model, inputs)
    assert error(gradient, expected) < ROUNDING


def test_compiled_model_has_no_break() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = optimised_copy(original)
    call = {**inputs, "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(result_of(compiled, call), result_of(original, call)) < ROUNDING
    assert error(gradient_of(compiled, call), gradient_of(original, call)) < INT8_NOISE


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
@pytest.mark.parametrize("extras", [False, True])
def test_blocks_of_timm_compute_what_their_originals_do(level: str, extras: bool) -> None:
    original = timm_vit(**{"qk_norm": True, "init_values": 0.5} if extras else {})
    inputs = {"x": torch.randn(2, 3, 16, 16)}
    model = optimised_copy(original, level)
    with fused_calls() as calls:
        gradient = gradient_of(model, inputs)
    assert len(calls) == LAYERS
    bound = ROUNDING if level == "keep" else INT8_NOISE
    assert error(gradient, gradient_of(original, inputs)) < bound
