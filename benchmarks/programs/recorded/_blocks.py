"""What several recorded programs share: a transformer of plain torch, and random text.

Deterministic for a seeded process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        query, key, value = (
            self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        )
        y = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = x + self.attention(self.norms[0](x), mask, is_causal)
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class Decoder(nn.Module):
    """A causal language model with learnt positions."""

    def __init__(self, vocabulary: int, width: int, layers: int, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, max(2, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.is_checkpointed = False

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            if self.is_checkpointed:
                x = checkpoint(block, x, None, True, use_reentrant=False)
            else:
                x = block(x, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def text(vocabulary: int, batch: int, length: int, device: torch.device) -> Tensor:
    """Return random tokens, drawn on the host as a loader's are."""
    return torch.randint(0, vocabulary, (batch, length)).to(device)
