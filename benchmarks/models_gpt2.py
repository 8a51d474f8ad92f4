"""The models of models_gpt.py with blocks of transformers: the same functions, the same weights.

A block is a GPT2Block for each seed, so that vramx.optimize knows it; its norms' weights are 1, its
biases 0, and neither is trained, as the stacked models have none. Everything else is theirs. Needs
transformers. A step launches as often as all seeds together: five times the stacked models'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models_gpt import Block, Gpts, Shape


class SeparateGpts(Gpts):
    """Gpts whose blocks are transformers' own, one for each seed."""

    def __init__(self, seeds: Sequence[int], shape: Shape) -> None:
        super().__init__(seeds, shape)
        stacked: Any = self.blocks
        self.blocks = nn.ModuleList(SeparateBlock(block, shape) for block in stacked)


class SeparateBlock(nn.Module):
    """What a Block computes of (seeds, rows * length, width), seed by seed."""

    def __init__(self, block: Block, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        count = len(block.qkv.weight)
        self.of_seed = nn.ModuleList(_gpt2_block(block, seed, shape) for seed in range(count))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, self._shape.length, self._shape.width)
        parts = [
            block(rows.view(shape)).view(rows.shape)
            for block, rows in zip(self.of_seed, x.unbind(), strict=True)
        ]
        return torch.stack(parts)


@torch.no_grad()
def _gpt2_block(block: Block, seed: int, shape: Shape) -> nn.Module:
    """Return a GPT2Block with one seed's weights; both have them as (inputs, outputs)."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(
        n_embd=shape.width,
        n_head=shape.heads,
        n_positions=shape.length,
        activation_function="gelu",
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    made: Any = GPT2Block(config, layer_idx=0)
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or name.startswith("ln_"):
            parameter.fill_(float(name.startswith("ln_") and name.endswith("weight")))
            parameter.requires_grad_(False)
    for ours, theirs in (
        (block.qkv, made.attn.c_attn),
        (block.out, made.attn.c_proj),
        (block.up, made.mlp.c_fc),
        (block.down, made.mlp.c_proj),
    ):
        theirs.weight.copy_(ours.weight[seed])
    result: nn.Module = made
    return result
