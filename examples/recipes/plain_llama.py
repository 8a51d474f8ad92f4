"""A Llama in plain torch, for machines without transformers: the same names, the same arithmetic.

Only what the recipes call: tokens in, logits and the mean loss out. No cache, no masks but the
causal one. About the memory and the speed of transformers' LlamaForCausalLM of the same shape.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x.float() * scale).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.width, bias=False)
        self.k_proj = nn.Linear(hidden, key_heads * self.width, bias=False)
        self.v_proj = nn.Linear(hidden, key_heads * self.width, bias=False)
        self.o_proj = nn.Linear(heads * self.width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.width).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.key_heads, self.width).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.key_heads, self.width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, shape: SimpleNamespace) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape.hidden, shape.heads, shape.key_heads)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = FeedForward(shape.hidden, shape.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: SimpleNamespace) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = angles(input_ids.shape[1], self.width, x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class PlainLlama(nn.Module):
    """As transformers' LlamaForCausalLM: `model.model.layers`, `model.lm_head`, `.loss`."""

    def __init__(self, shape: SimpleNamespace) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return SimpleNamespace(logits=logits, loss=None)
        following = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.float().flatten(0, 1), following.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def angles(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, width, 2, device=like.device) / width
    angle = torch.arange(length, device=like.device)[:, None] / 10_000**steps
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
