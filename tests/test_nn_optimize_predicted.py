"""Steps of optimised models of transformers that are predicted."""

from __future__ import annotations

import pytest
import torch
from optimize_tools import decoder
from test_nn_optimize_models import seed, transformers

import vramx

__all__ = ["seed"]  # a fixture


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
