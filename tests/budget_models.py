"""Small programs of the kinds that people train, to predict their memory and to fit a batch.

Each makes, on a device, a model, an optimizer and a step of a batch size (its longest batch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, WORDS = 256, 512, 4096


@dataclass
class Program:
    """A training: `step(batch, length)` takes a whole step; `length` is at most `longest`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    longest: int = 0


class Block(nn.Module):
    """A block of a transformer, with an adapter beside its first product if `rank` says so."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "12")
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        self.adapter = (
            nn.Sequential(nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, 3 * WIDTH))
            if rank
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        projected = self.qkv(y) if self.adapter is None else self.qkv(y) + self.adapter(y)
        q, k, v = projected.unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    def __init__(self, rank: int = 0, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(rank) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return cross_entropy(self.head(x).flatten(0, 1).float(), words.flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(images).mean((2, 3))).square().mean()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0]).square().mean()


def _program(
    model: nn.Module, make: Callable[[int, int], Tensor], *, length: int, amp: bool = False
) -> Program:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(batch: int, length: int = length) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = model(make(batch, length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(model, optimizer, step, length)


def _words(batch: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (batch, length), device="cuda")


def transformer() -> Program:
    return _program(Language().cuda(), _words, length=TOKENS)


def autocast() -> Program:
    return _program(Language().cuda(), _words, length=TOKENS, amp=True)


def checkpointed() -> Program:
    return _program(Language(checkpointed=True).cuda(), _words, length=TOKENS, amp=True)


def varying() -> Program:
    return _program(Language().cuda(), _words, length=2 * TOKENS, amp=True)


def adapters() -> Program:
    model = Language(rank=8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return _program(model.cuda(), _words, length=TOKENS, amp=True)


def convolutions() -> Program:
    return _program(
        Images().cuda(), lambda n, side: torch.randn(n, 3, side, side, device="cuda"), length=64
    )


def recurrent() -> Program:
    return _program(
        Sequences().cuda(), lambda n, t: torch.randn(n, t, WIDTH, device="cuda"), length=TOKENS
    )


PROGRAMS = {
    each.__name__: each
    for each in (transformer, convolutions, recurrent, varying, adapters, autocast, checkpointed)
}
