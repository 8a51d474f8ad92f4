"""Long sequences in optimised models of transformers: what is made, kept and predicted of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimize_tools import (
    DECODERS,
    INT8_NOISE,
    LAYERS,
    assert_computes,
    bytes_kept,
    decoder,
    error,
    gradient_of,
    hugging_face,
    llama_block,
    optimised_copy,
    padded,
)
from test_nn_optimize_models import transformers

import vramx
from vramx.nn import products
from vramx.nn.families import attention
from vramx.nn.families import decoder as decoder_family

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_TILE_ROWS", 4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_long_sequences_go_through_some_heads_at_a_time(
    name: str, masked: bool, monkeypatch: Any
) -> None:
    groups: list[Any] = []
    monkeypatch.setattr(
        decoder_family,
        "attend_in_groups",
        lambda *of: groups.append(attention.attend_in_groups(*of)) or groups[-1],
    )
    original, inputs = hugging_face(transformers, name)
    inputs = padded(inputs) if masked else inputs
    model = optimised_copy(original, "recompute_all")
    assert_computes(model, original, inputs, "recompute_all")
    # In the forward pass of the result, and in both of the gradient; not where a kind of block is
    # compared with its original first.
    assert sum(each is not None for each in groups) == 3 * LAYERS


@pytest.mark.usefixtures("small_tiles")
def test_long_sequences_meet_biases_of_every_projection() -> None:
    original = decoder(transformers, attention_bias=True, mlp_bias=True)
    inputs = hugging_face(transformers, "llama")[1]
    model = optimised_copy(original, "recompute_all")
    assert_computes(model, original, inputs, "recompute_all")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_autocast_leaves_the_residuals_of_long_sequences_in_their_type(name: str) -> None:
    original, inputs = hugging_face(transformers, name)
    model = optimised_copy(original, "recompute_all")
    types: list[Any] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _module, _inputs, y: types.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        gradient = gradient_of(model, inputs)
        exact = gradient_of(original, inputs)
    assert set(types) == {torch.float32}
    assert error(gradient, exact) < 2 * INT8_NOISE


@pytest.mark.parametrize("level", ["int8", "recompute_all"])
def test_a_mask_and_shared_heads_do_not_meet_in_torchs_attention(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """No kernel takes both: torch would make the scores of all pairs of tokens."""
    model, inputs = hugging_face(transformers, "llama")
    model.set_attn_implementation("sdpa")
    attend, both = torch.nn.functional.scaled_dot_product_attention, []

    def seen(*args: Any, **kwargs: Any) -> Any:
        masked = kwargs.get("attn_mask") is not None or any(a is not None for a in args[3:4])
        both.append(masked and kwargs.get("enable_gqa", False))
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    vramx.optimize(model, level)
    gradient_of(model, padded(inputs))
    assert not any(both)
    assert len(both) >= (0 if level == "int8" else 2 * LAYERS)


# Bytes for an element that probes take, of 2 bytes each and fewer than ten.
PROBES = 20 / (512 * 128)


def test_llama_block_keeps_the_bytes_of_its_packs() -> None:
    block, call = llama_block()
    # 134 bytes for 128 elements: of two norms' inputs, values, and a gated unit's two. q and k are
    # in bfloat16, and each norm keeps a float for each token.
    packed, of_norms = 134 / 128, 2 * 4 / 512
    attended = (2 + 1 / 4) * packed + 2 * (1 + 1 / 4) + of_norms
    assert bytes_kept(block, call) > 45
    vramx.optimize(block)
    assert bytes_kept(block, call) == pytest.approx(attended + 7 * packed, abs=PROBES)
    vramx.optimize(block, "recompute_mlp")
    assert bytes_kept(block, call) == pytest.approx(attended, abs=PROBES)


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
