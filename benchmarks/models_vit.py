"""A vision transformer in torch's own modules, with the operations of timm's ViT-L.

For machines that have no timm: patches, a class token, blocks of attention and a multilayer
perceptron, each behind a norm and beside the residual, and a linear head on the class token.
Deterministic for a seeded process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.functional import scaled_dot_product_attention as attend


@dataclass(frozen=True)
class Shape:
    """The size of the model and of its pictures."""

    width: int = 1024
    layers: int = 8
    heads: int = 16
    side: int = 224
    patch: int = 16

    @property
    def tokens(self) -> int:
        """The patches of a picture, and the class token."""
        return (self.side // self.patch) ** 2 + 1


class Block(nn.Module):
    """Attention and a multilayer perceptron."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self._heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self._heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = attend(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.proj(y)
        hidden: Tensor = self.fc2(gelu(self.fc1(self.norm2(x))))
        return x + hidden


class VisionTransformer(nn.Module):
    """Pictures of three channels to scores of classes."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, shape.patch, shape.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.places = nn.Parameter(0.02 * torch.randn(1, shape.tokens, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores
