"""Gradients of models with outlier channels, as pretrained language models have them.

A few channels of the residual stream are constant and of 1000 times the rest. Either the norm's
weight makes them small again, or they are of 100 times the rest behind the norm as well. Wherever
a tensor that has them is packed, the rest must not pay for it: the gradient of every parameter has
a cosine of 0.999 with the exact one, the mean of three draws. Left out are parameters whose
gradient nearly cancels, so that bfloat16 itself is further off. Everything else is float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from compress_tools import worst_cosine
from torch import Tensor, nn
from torch.nn.functional import silu

import vramx
from vramx.compression.codec import random, reference
from vramx.compression.codec.codec import bytes_of
from vramx.compression.config import Compression
from vramx.nn.functional import linears, rms_norm, swiglu

HIDDEN, TOKENS, DRAWS = 256, 64, 3
COSINE, BYTES = 0.999, 1.05
# One or two of them in a group of 128 channels, and one beside a group's end.
CHANNELS = {"one in a group": (5, 200), "two in a group": (5, 77, 128, 255)}
LEVELS = ("int8", "recompute_mlp", "recompute_all")


class Llama(nn.Module):
    """A block with RMS norms and a gated unit, of torch's own operations or of the fused ones."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, 1e-6), nn.RMSNorm(HIDDEN, 1e-6)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        (qkv,) = self._products(self.norm1, x, self.qkv)
        heads = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self._products(self.norm2, x, self.gate, self.up)
        return x + self.down(swiglu(gate, up) if self.fused else silu(gate) * up)

    def _products(self, norm: nn.RMSNorm, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        if not self.fused:
            h = norm(x)
            return tuple(layer(h) for layer in layers)
        normed = rms_norm(x, norm.weight, norm.eps)
        return linears(normed, [layer.weight for layer in layers])


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(
        HIDDEN, 4, 2 * HIDDEN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


class Program(NamedTuple):
    """A model, its input and the weights of its loss."""

    model: nn.Module
    x: Tensor
    weights: Tensor

    def gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        (self.model(self.x).float() * self.weights).sum().backward()
        return {name: p.grad.double() for name, p in self.model.named_parameters()}


def program(make: Callable[[], nn.Module], channels: tuple[int, ...], where: str) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).train()
    x = torch.randn(2, TOKENS, HIDDEN)
    size = 1000.0 if where == "residual" else 100.0
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])[: len(channels)]
    x[..., list(channels)] = size * signs * torch.linspace(0.5, 1.0, len(channels))
    # Behind the norm the rest is of size one again.
    weight = x.square().mean().sqrt() * (0.8 + 0.4 * torch.rand(HIDDEN))
    if where == "residual":
        weight[list(channels)] /= size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and "weight" in name:
                parameter.copy_(weight)
            elif parameter.dim() == 2 and where == "behind the norm":
                parameter[:, [c for c in channels if c < parameter.shape[1]]] /= size
    return Program(model, x, torch.randn(2, TOKENS, HIDDEN))


@lru_cache
def exact(
    make: Callable[[], nn.Module], channels: tuple[int, ...], where: str
) -> dict[str, Tensor]:
    """Return the gradients of the parameters that bfloat16 takes within the bound."""
    made = program(make, channels, where)
    gradients = made.gradients()
    narrow = Program(copy.deepcopy(made.model).bfloat16(), made.x.bfloat16(), made.weights)
    rounded = narrow.gradients()
    return {
        name: g for name, g in gradients.items() if worst_cosine([g], [rounded[name]]) >= COSINE
    }


def cosines(
    make: Callable[[], nn.Module], channels: tuple[int, ...], where: str, level: str
) -> dict[str, float]:
    """Return the mean cosine of each parameter's gradient with a level of LEVELS, or "hooks"."""
    expected = exact(Llama if make is fused_llama else make, channels, where)
    made = program(make, channels, where)
    if make is encoder and level != "hooks":
        assert len(vramx.optimize(made.model, level).swapped) == 2
    totals = dict.fromkeys(expected, 0.0)
    random.manual_seed(0, rank=0)
    for _ in range(DRAWS):
        with vramx.compress(min_bytes=0) if level == "hooks" else nullcontext():
            found = made.gradients()
        for name, gradient in expected.items():
            totals[name] += worst_cosine([found[name]], [gradient]) / DRAWS
    return totals


def fused_llama() -> nn.Module:
    return Llama(fused=True)


WAYS = [(Llama, "hooks"), (fused_llama, "int8"), (encoder, "hooks")]
WAYS += [(encoder, level) for level in LEVELS]
every_way = pytest.mark.parametrize(
    ("make", "level"), WAYS, ids=[f"{make.__name__} {level}" for make, level in WAYS]
)


@pytest.mark.parametrize("where", ["residual", "behind the norm"])
@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
@every_way
def test_gradients_point_as_the_exact_ones(
    make: Callable[[], nn.Module], level: str, channels: tuple[int, ...], where: str
) -> None:
    found = cosines(make, channels, where, level)
    assert len(found) >= 12, "so few are left to compare that nothing is known"
    worst = min(found, key=lambda name: found[name])
    assert found[worst] >= COSINE, worst


def no_outliers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what split_outliers() does, of a codec that has none."""
    scale_bits = reference._scale_bits(x.abs().amax(1), 126)
    words = torch.zeros(len(x), dtype=torch.int32)
    return torch.zeros_like(x, dtype=torch.int32), words, scale_bits


@pytest.mark.parametrize(("make", "level"), [(Llama, "hooks"), (fused_llama, "int8")])
def test_a_codec_without_outliers_would_be_found(
    make: Callable[[], nn.Module], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "split_outliers", no_outliers)
    found = cosines(make, CHANNELS["two in a group"], "residual", level)
    assert min(found.values()) < COSINE


def test_a_packed_element_takes_no_more_bytes_than_promised() -> None:
    assert bytes_of(1 << 20, Compression().format()) / (1 << 20) <= BYTES
