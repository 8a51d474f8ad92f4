"""Models and inputs that several programs share: a Llama of random weights, and random tokens.

Nothing is downloaded. Deterministic for a seeded process.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.programs._report import Recorder, sized

VOCABULARY = sized(32_000, 512)


def llama(recorder: Recorder, layers: int = 16) -> Any:
    """Build a Llama of 0.5 B parameters at 16 layers, begin, and move it there in bfloat16."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sized(1536, 64),
        intermediate_size=sized(4096, 128),
        num_hidden_layers=sized(layers, 2),
        num_attention_heads=sized(12, 4),
        num_key_value_heads=sized(4, 2),
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device=recorder.begin(), dtype=torch.bfloat16)


def tokens(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Return random token ids, drawn on the host so that every device sees the same."""
    return torch.randint(0, VOCABULARY, (batch, length)).to(device)


def train_llama(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """Take one step of a causal language model and return its loss."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss
