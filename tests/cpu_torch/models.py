"""Three small models and their batches: a perceptron, a convolutional network and a Transformer.

Sizes are such that a step takes some ten milliseconds on one core and several of its tensors are
above 1 MiB, from where the allocator puts blocks together from free pieces. Everything is drawn
from torch's generator, so that a seed decides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

CLASSES = 10


@dataclass(frozen=True)
class Program:
    """A model, and how to draw a batch of a given size for it."""

    make_model: Callable[[], nn.Module]
    draw_batch: Callable[[int], torch.Tensor]
    batch_sizes: tuple[int, int]  # lowest and highest


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 2048),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(2048, 64),
        nn.Linear(64, 2048),
        nn.ReLU(),
        nn.Linear(2048, CLASSES),
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        attended = functional.softmax(scores, dim=-1) @ value
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """Two blocks over embedded tokens; the mean over the sequence is classified."""

    def __init__(self, words: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


PROGRAMS = {
    "perceptron": Program(perceptron, lambda n: torch.randn(n, 64), (64, 256)),
    "convolutional": Program(convolutional, lambda n: torch.randn(n, 3, 32, 32), (8, 40)),
    "transformer": Program(Transformer, lambda n: torch.randint(256, (n, 48)), (6, 16)),
}


@dataclass(frozen=True)
class Trained:
    """What a training leaves: each step's loss, and the model's parameters and buffers."""

    losses: list[float]
    tensors: list[torch.Tensor]


def train(name: str, steps: int, between: Callable[[int], None] | None = None) -> Trained:
    """Train a model on batches of changing size.

    Args:
        between: called before each step, with its number.
    """
    program = PROGRAMS[name]
    torch.manual_seed(1)
    model = program.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        if between is not None:
            between(step)
        size = int(torch.randint(program.batch_sizes[0], program.batch_sizes[1] + 1, ()))
        batch, labels = program.draw_batch(size), torch.randint(CLASSES, (size,))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    return Trained(losses, tensors)
