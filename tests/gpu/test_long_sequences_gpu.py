"""Training on one sequence of 32,768 tokens: a step keeps little of each block, and in no square.

What is kept of everything would be 6.4 GB here, and products of all tokens with all are 17 GB.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import vramx
from benchmarks.models_configs import llama_config
from benchmarks.programs._window import windowed

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, LAYERS = 32_768, 1024, 4
# What a block that runs again makes in backward is some 10 rows of bfloat16 a token, as predicted.
MOST_BYTES = TOKENS * WIDTH * 2 * 14


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("steps_in_backward", [False, True])
def test_a_step_keeps_a_blocks_input_only(
    window: int, offload: str | None, steps_in_backward: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    before_bytes = torch.cuda.memory_allocated()
    config = llama_config(2048, (WIDTH, LAYERS, 2816, 8, 2), max_position_embeddings=4096)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(0, 2048, (1, TOKENS))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if steps_in_backward:
        optimizer = vramx.offload_optimizer(optimizer, in_backward=True, bucket="16MiB")
    vramx.optimize(model, "recompute_all", offload=offload)
    weights_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    losses = []
    with windowed(window, of_blocks=True) if window else contextlib.nullcontext():
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[1] < losses[0]
    # Beside weights there are their gradients, and two moments or the slots of some.
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert peak_bytes <= 4 * weights_bytes + MOST_BYTES
