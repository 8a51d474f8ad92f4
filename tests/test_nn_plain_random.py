"""Blocks that are written by chance, most almost plain: read or left, they compute the same.

A choice that is no plain block's is in each of some places by a chance of one in twenty. Dropout is
of all or of nothing, so that what it drops is known. In double precision, so that only rounding
differs.
"""

from __future__ import annotations

import copy
import random
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from plain_tools import far, fused_blocks
from torch import Tensor, nn

import vramx

pytestmark = pytest.mark.slow

WIDTH = 16
# Names in braces are places; of each, what plain blocks have, and what they do not.
SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = {norm}, {norm}
        self.qkv, self.proj = nn.Linear(16, 48, bias={bias}), nn.Linear(16, 16)
        self.drop, self.after = nn.Dropout({p}), nn.Dropout({p})
        self.inner, self.unit, self.outer = nn.Linear(16, 32), {unit}, nn.Linear(32, 16)
        self.register_buffer("early", torch.ones(12, 12).tril())
        self.register_buffer("late", torch.ones(12, 12).triu(1).bool())
        self.register_buffer("share", torch.tensor(0.7))
        self.scale = 8**-0.5

    def attn(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(16, -1)
        {heads}
        a = {scores}
        a = {scaled}
        a = {masked}
        a = {soft}
        a = {dropped}
        y = {attended}
        return {out}

    def ff(self, x):
        h = self.inner(x)
        h = {active}
        return self.outer(h)

    def forward(self, x):
        {sums}
"""
PLACES: dict[str, tuple[list[str], list[str]]] = {
    "norm": (
        ["nn.LayerNorm(16)", "nn.RMSNorm(16)", "nn.LayerNorm(16, elementwise_affine=False)"],
        ["nn.LayerNorm((5, 16))", "nn.Identity()"],
    ),
    "bias": (["True", "False"], []),
    "p": (["0.0", "0.0", "0.0", "1.0"], []),
    "unit": (
        ["nn.GELU()", "nn.SiLU()", "nn.ReLU()", "nn.Tanh()", "Swish()"],
        ["nn.Softmax(-1)", "nn.Identity()", "nn.ReLU(inplace=True)", "nn.PReLU()"],
    ),
    "heads": (
        [
            "q, k, v = self.qkv(x).view(B, T, 3, 2, 8).permute(2, 0, 3, 1, 4)",
            "q, k, v = (z.view(B, T, 2, -1).transpose(1, 2) for z in (q, k, v))",
            "v, q, k = [z.unflatten(2, (2, 8)).swapaxes(1, 2) for z in (q, k, v)]",
        ],
        [
            "q, k, v = self.qkv(x).view(B, T, 2, 3, 8).permute(3, 0, 2, 1, 4)",
            "q, k, v = self.qkv(x).view(B, T, 3, 8, 2).permute(2, 0, 4, 1, 3)",
            "q, k, v = (z.reshape(B, 2, T, 8) for z in (q, k, v))",
            "q, k, v = (z.view(B, T, 2, 8) for z in (q, k, v))",
        ],
    ),
    "scores": (
        ["q @ k.transpose(-2, -1)", "torch.matmul(q, k.mT)", "(q * 1.5) @ k.transpose(2, 3)"],
        ["k @ q.transpose(-2, -1)", "q @ (k * self.share).mT", "q @ k.mT + 1"],
    ),
    "scaled": (
        ["a * self.scale", "a / 3.0", "a.mul(0.35)", "a"],
        ["a * self.share", "a / T", "a * -0.1", "a * 0", "a.mul_(2)", "a.relu()"],
    ),
    "masked": (
        [
            "a",
            "a.masked_fill(self.early[:T, :T] == 0, float('-inf'))",
            "a.masked_fill_(self.late[:T, :T], -1e9)",
            "a.masked_fill(~self.early[3 : 3 + T, 3 : 3 + T].bool(), -torch.inf)",
        ],
        [
            "a.masked_fill(self.early[:T, :T] == 1, -torch.inf)",
            "a.masked_fill(self.early[:T, :T].mT == 0, -torch.inf)",
            "a.masked_fill(self.late[:T, :T], -100.0)",
            "a.masked_fill(self.late[:T, :T], -1e9) * 1e-9",
            "a + self.late[:T, :T] * -1e9",
            "a * self.early[:T, :T]",
        ],
    ),
    "soft": (
        ["a.softmax(-1)", "F.softmax(a, dim=3)", "torch.softmax(a, -1)"],
        ["a.softmax(-2)", "a.softmax(-1).softmax(-1)", "a.sigmoid()", "a"],
    ),
    "dropped": (
        ["self.drop(a)", "F.dropout(a, self.drop.p, self.training)", "a"],
        ["self.drop(self.drop(a))", "a * 0.5", "a.masked_fill(self.late[:T, :T], 0.0)"],
    ),
    "attended": (["a @ v", "torch.matmul(a, v)"], ["a.mT @ v", "a @ v * 2", "a @ k", "a @ v + v"]),
    "out": (
        [
            "self.proj(y.transpose(1, 2).reshape(B, T, C))",
            "self.after(self.proj(y.permute(0, 2, 1, 3).flatten(2)))",
        ],
        [
            "self.proj(y.reshape(B, T, C))",
            "self.proj(y.permute(0, 2, 3, 1).reshape(B, T, C))",
            "self.proj(y.transpose(1, 2).reshape(B, T, C)) + x",
            "self.proj(self.proj(y.transpose(1, 2).flatten(2)))",
        ],
    ),
    "active": (
        ["self.unit(h)", "F.gelu(h)", "F.gelu(h, approximate='tanh')", "self.after(F.silu(h))"],
        ["h", "F.relu(h) ** 2", "F.gelu(-h)", "self.unit(h) * h", "F.gelu(F.gelu(h))", "h.tanh()"],
    ),
    "sums": (
        [
            "x = x + self.attn(self.first(x)); return x + self.ff(self.second(x))",
            "x = self.attn(self.first(x)).add(x); return torch.add(x, self.ff(self.second(x)))",
        ],
        [
            "x = self.first(x); x = x + self.attn(x); return x + self.ff(self.second(x))",
            "return x + self.attn(self.first(x)) + self.ff(self.second(x))",
            "y = x + self.attn(self.first(x)); return x + self.ff(self.second(y))",
            "y = x + self.attn(self.first(x)); return y + self.ff(self.second(x))",
            "x = x - self.attn(self.first(x)); return x + self.ff(self.second(x))",
            "x = x + self.attn(self.first(x)) * 0.5; return x + self.ff(self.second(x))",
            "y = self.attn(self.first(x)); x = x + y + y; return x + self.ff(self.second(x))",
            "x = x + self.attn(self.first(x)); return x + x + self.ff(self.second(x))",
            "x = x + self.attn(self.first(x)).detach(); return x + self.ff(self.second(x))",
            "x = x + self.ff(self.first(x)); return x + self.attn(self.second(x))",
            "x = self.after(x) + self.attn(self.first(x)); return x + self.ff(self.second(x))",
            "x = x + self.attn(self.second(x)); return x + self.ff(self.second(x))",
        ],
    ),
}


def written(seed: int) -> str:
    """Return the source of a block."""
    chance = random.Random(seed)
    source = SOURCE
    for place, (plain, others) in PLACES.items():
        while f"{{{place}}}" in source:
            choices = others if others and chance.random() < 1 / 20 else plain
            source = source.replace(f"{{{place}}}", chance.choice(choices), 1)
    return source


def _blocks(seeds: range) -> Iterator[tuple[int, nn.Module]]:
    for seed in seeds:
        module = types.ModuleType(f"block_{seed}")
        sys.modules[module.__name__] = module
        exec(compile(written(seed), module.__name__, "exec"), vars(module))
        torch.manual_seed(seed)
        yield seed, nn.Sequential(module.Block()).double().train()
        del sys.modules[module.__name__]


def _results(model: nn.Module, tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    found = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    # A mask may leave a row nothing.
    return [g.detach().nan_to_num(7.0) for g in (y, *found) if g is not None]


@pytest.mark.parametrize("first", [0, 80, 160, 240])
def test_blocks_that_are_read_or_left_compute_the_same(first: int) -> None:
    read, left = 0, 0
    for seed, model in _blocks(range(first, first + 80)):
        tokens, twin = (5, 7, 1)[seed % 3], copy.deepcopy(model)
        try:
            expected = _results(twin, tokens)
        except RuntimeError:  # it is no program
            continue
        is_read = fused_blocks(vramx.optimize(model, "keep")) == 1
        found = _results(model, tokens)
        assert far(found, expected) < (1e-9 if is_read else 1e-300), written(seed)
        read, left = read + is_read, left + (not is_read)
    assert read > 20
    assert left > 10
