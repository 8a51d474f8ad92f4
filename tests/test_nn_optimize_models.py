"""vramx.optimize on models of transformers and timm, and below checkpointing."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from norm_tools import held_bytes
from optimize_tools import (
    DECODERS,
    HUGGING_FACE,
    INT8_NOISE,
    LAYERS,
    NEW_IN_5,
    ROUNDING,
    any_model,
    cache_word,
    decoder,
    error,
    fused_calls,
    gradient_of,
    hugging_face,
    result_of,
    timm_vit,
    twin,
)
from torch import nn

import vramx
from vramx.errors import VramxWarning
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
    assert error(gradient, gradient_of(original, inputs)) < bound


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padded_batches_are_masked_as_in_the_original(name: str, implementation: str) -> None:
    original, inputs = hugging_face(transformers, name)
    original.set_attn_implementation(implementation)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -5:] = 0
    padded = {**inputs, "attention_mask": mask}
    model = twin(original)
    vramx.optimize(model)
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


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp", "recompute_all"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_long_sequence_is_predicted_without_the_scores_of_its_attention(
    level: str, cached: bool
) -> None:
    """A mask of all pairs of tokens alone would take 16 MiB, half a layer's scores 64."""
    tokens = 4096
    with torch.device("meta"):
        model = decoder(transformers).bfloat16()
        model.set_attn_implementation("sdpa")
        model.config.use_cache = cached
        ids = torch.empty(1, tokens, dtype=torch.long)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    prediction = vramx.predict(step, levels=(level,), policies="live")
    row = prediction.row(level)
    assert row.why_not is None
    assert prediction.peak_bytes(level=level) < tokens * tokens
    # Beside a cache transformers does not ask whether a row has several sequences.
    assert cached or any("one sequence" in each for each in prediction.assumptions)


def test_a_loss_without_logits_is_predicted_without_them() -> None:
    tokens, classes = 1024, 100_000
    config = transformers.LlamaConfig(
        vocab_size=classes,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16().train()
        ids = torch.empty(1, tokens, dtype=torch.long)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    exact = vramx.predict(step, policies="live", steps=1)
    prediction = vramx.predict(step, levels=("keep",), policies="live", steps=1)
    logits = tokens * classes * 2
    assert exact.peak_bytes() > 2 * logits
    # The weights, their gradient twice, and the logits of as many tokens as go through at a time.
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert prediction.peak_bytes(level="keep") < 3 * weights + logits


def test_block_whose_class_is_changed_on_top_is_fused_still(monkeypatch: Any) -> None:
    # fully_shard() makes a subclass, named otherwise, for each module that it is given.
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    vramx.optimize(model)
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
    model = twin(original)
    vramx.optimize(model)
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
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    hidden, tokens = 512, 128
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_attention_heads=8,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    block = modeling.LlamaDecoderLayer(config, 0).bfloat16().train()
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    # One pair for all layers of a model.
    positions = modeling.LlamaRotaryEmbedding(config)(x, torch.arange(tokens)[None])
    apart = [*positions, *block.parameters()]

    def bytes_kept() -> float:
        return held_bytes(lambda: block(x, position_embeddings=positions), *apart) / x.numel()

    # 134 bytes for 128 elements: of two norms' inputs, values, and a gated unit's two. q and k are
    # in bfloat16, and each norm keeps a float for each token.
    packed, of_norms = 134 / 128, 2 * 4 / hidden
    attended = (2 + 1 / 4) * packed + 2 * (1 + 1 / 4) + of_norms
    assert bytes_kept() > 45
    vramx.optimize(block)
    assert bytes_kept() == pytest.approx(attended + 7 * packed, abs=PROBES)
    vramx.optimize(block, "recompute_mlp")
    assert bytes_kept() == pytest.approx(attended, abs=PROBES)


def test_cache_in_training_is_filled_as_by_the_original() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    vramx.optimize(model)
    with fused_calls() as calls:
        found = model(**inputs, use_cache=True)
    expected = original(**inputs, use_cache=True)
    assert len(calls) == LAYERS
    assert error(found[0], expected[0]) < ROUNDING
    lengths = {out[cache_word(original)].get_seq_length() for out in (found, expected)}
    assert lengths == {inputs["input_ids"].shape[1]}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputed_blocks_leave_a_new_cache_empty_and_say_so(name: str) -> None:
    original, inputs = hugging_face(transformers, name)
    model = twin(original)
    vramx.optimize(model, "recompute_all")
    with pytest.warns(VramxWarning, match="use_cache=False"):
        found = model(**inputs, use_cache=True)
    word = cache_word(original)
    assert found[word].get_seq_length() == 0
    assert error(found[0], original(**inputs)[0]) < ROUNDING
    # What a cache has already is part of the result: such a call is not recomputed.
    with torch.no_grad():
        cache = original(**inputs, use_cache=True)[word]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(**inputs, **{word: copy.deepcopy(cache)})
    assert error(found[0], original(**inputs, **{word: copy.deepcopy(cache)})[0]) < ROUNDING


def test_generation_is_the_originals_to_the_token() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    vramx.optimize(model)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    found = model.eval().generate(**inputs, **options)
    assert torch.equal(found, original.eval().generate(**inputs, **options))


def test_attention_weights_are_returned_where_they_are_asked_for() -> None:
    original, inputs = hugging_face(transformers, "llama")
    original.set_attn_implementation("eager")
    model = twin(original)
    vramx.optimize(model)
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
    model = twin(original)
    vramx.optimize(model, "recompute_all")
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


def test_attention_of_another_kind_is_called_as_it_is() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    model.config._attn_implementation = "flex_attention"
    report = vramx.optimize(model, "keep")
    assert "its attention is 'flex_attention'" in str(report)
    attention = model.model.layers[0].self_attn
    seen: list[int] = []
    forward = type(attention).forward
    attention.forward = lambda *a, **k: seen.append(1) or forward(attention, *a, **k)
    model.config._attn_implementation = "sdpa"
    assert error(result_of(model, inputs), result_of(original, inputs)) < ROUNDING
    assert seen == [1]


def test_block_of_a_release_with_other_arguments_is_left(monkeypatch: Any) -> None:
    model, _ = hugging_face(transformers, "llama")
    cls = type(model.model.layers[0])

    def forward(self: Any, hidden_states: Any, surprise: Any = None) -> Any: ...

    forward.__module__ = cls.__module__
    monkeypatch.setattr(cls, "forward", forward)
    with pytest.warns(VramxWarning, match=f"LlamaDecoderLayer of transformers {VERSION} is left"):
        report = vramx.optimize(model)
    assert {row.module for row in report.swapped} == {"LlamaRMSNorm", "Linear"}
    assert "its forward takes surprise: not known" in str(report)


def test_cache_argument_may_have_any_name(monkeypatch: Any) -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    cls = type(model.model.layers[0])
    theirs, word = cls.forward, cache_word(model)

    def forward(
        self: Any, hidden_states: Any, attention_mask: Any = None, position_ids: Any = None,
        memory: transformers.Cache | None = None, use_cache: Any = False,
        position_embeddings: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        given = {word: kwargs.pop(word, memory), "use_cache": use_cache}
        others = {"attention_mask": attention_mask, "position_ids": position_ids, **given}
        others["position_embeddings"] = position_embeddings
        return theirs(self, hidden_states, **others, **kwargs)

    forward.__module__ = cls.__module__
    monkeypatch.setattr(cls, "forward", forward)
    report = vramx.optimize(model, "keep")
    assert [row.module for row in report.swapped].count(cls.__name__) == LAYERS
    with fused_calls() as calls:
        gradient = gradient_of(model, inputs)
    assert len(calls) == LAYERS
    assert error(gradient, gradient_of(original, inputs)) < ROUNDING


@pytest.mark.parametrize("part", ["layer", "attention", "mlp", "norm"])
def test_block_that_computes_something_else_is_left(part: str, monkeypatch: Any) -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    layer = model.model.layers[0]
    parts = {"layer": layer, "attention": layer.self_attn, "mlp": layer.mlp}
    cls = type({**parts, "norm": layer.input_layernorm}[part])
    theirs = cls.forward

    @functools.wraps(theirs)  # its arguments, and its module
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = theirs(self, *args, **kwargs)
        return (1.5 * found[0], *found[1:]) if isinstance(found, tuple) else 1.5 * found

    monkeypatch.setattr(cls, "forward", forward)
    with pytest.warns(VramxWarning, match="of a small one of its class, its result differs"):
        report = vramx.optimize(model, "keep")
    assert not [row for row in report.swapped if row.module == "LlamaDecoderLayer"]
    assert error(result_of(model, inputs), result_of(original, inputs)) == 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_block_of_an_unknown_release_is_left_with_a_warning(name: str) -> None:
    original, inputs = any_model(transformers, name)
    model = twin(original)
    with pytest.warns(VramxWarning, match=f"of transformers {VERSION} is left as it was"):
        report = vramx.optimize(model)
    assert not [row for row in report.swapped if row.name != "lm_head"]
    assert error(result_of(model, inputs), result_of(original, inputs)) == 0


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_verification_accepts_every_model(name: str, checkpointed: bool) -> None:
    original, inputs = hugging_face(transformers, name)
    model = twin(original)
    vramx.optimize(model, verify=True)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error", VramxWarning)
        # It verifies calls without a cache only, which not all models take an argument for.
        model.config.use_cache = False
        gradient = gradient_of(model, inputs)
    blocks = [module for module in model.modules() if hasattr(module, "vramx_settings")]
    assert len(blocks) >= LAYERS
    assert not any(block.vramx_settings.unverified for block in blocks)
    assert error(gradient, gradient_of(original, inputs)) < INT8_NOISE


def test_compiled_model_has_no_break() -> None:
    original, inputs = hugging_face(transformers, "llama")
    model = twin(original)
    vramx.optimize(model)
    call = {**inputs, "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(result_of(compiled, call), result_of(original, call)) < ROUNDING
    assert error(gradient_of(compiled, call), gradient_of(original, call)) < INT8_NOISE


def test_copy_of_an_optimised_model_trains_apart() -> None:
    model, inputs = hugging_face(transformers, "gpt2")
    vramx.optimize(model, "keep")
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert error(gradient_of(other, inputs), gradient_of(model, inputs)) > 0.01
    assert len(vramx.restore(other)) == LAYERS + 2  # and the model and its head


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_mlp"])
@pytest.mark.parametrize("extras", [False, True])
def test_blocks_of_timm_compute_what_their_originals_do(level: str, extras: bool) -> None:
    original = timm_vit(**{"qk_norm": True, "init_values": 0.5} if extras else {})
    inputs = {"x": torch.randn(2, 3, 16, 16)}
    model: nn.Module = twin(original)
    vramx.optimize(model, level)
    with fused_calls() as calls:
        gradient = gradient_of(model, inputs)
    assert len(calls) == LAYERS
    bound = ROUNDING if level == "keep" else INT8_NOISE
    assert error(gradient, gradient_of(original, inputs)) < bound
