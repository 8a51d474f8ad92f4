"""Models and inputs that several programs share: a Llama of random weights, and random tokens.

Nothing is downloaded. Deterministic for a seeded process.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.models_configs import llama_config
from benchmarks.programs._report import Recorder, sized

VOCABULARY = sized(32_000, 512)


def llama(recorder: Recorder, layers: int = 16) -> Any:
    """Build a Llama of 0.5 B parameters at 16 layers, begin, and move it there in bfloat16."""
    sizes = sized((1536, layers, 4096, 12, 4), (64, 2, 128, 4, 2))
    model: Any = LlamaForCausalLM(llama_config(VOCABULARY, sizes, max_position_embeddings=4096))
    return model.to(device=recorder.begin(), dtype=torch.bfloat16)


def tokens(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Return random token ids, drawn on the host so that every device sees the same."""
    return torch.randint(0, VOCABULARY, (batch, length)).to(device)


def train(recorder: Recorder, model: Any, rows: int, lengths: tuple[int, int]) -> None:
    """Train a causal language model, on batches of a length between two, and report."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(recorder.steps):
        batch = tokens(rows, recorder.random.randint(*lengths), model.device)
        with recorder.step():
            loss = train_llama(model, optimizer, batch)
        recorder.loss(loss)
    recorder.finish()


def train_llama(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """Take one step of a causal language model and return its loss."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss
