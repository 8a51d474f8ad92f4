"""A block that does in every way what programs of others do, an option each, and models of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.checkpoint import checkpoint

import vramx

WIDTH, HEADS, SIZE, TOKENS = 64, 4, 16, 24


class OwnNorm(nn.Module):
    """A layer norm whose bias is optional."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if bias else None

    def forward(self, given: Tensor) -> Tensor:
        return F.layer_norm(given, self.weight.shape, self.weight, self.bias, 1e-5)


class NormByHand(nn.Module):
    """A layer norm in steps of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(variance + 1e-5)


class Swish(nn.Module):
    """An activation that no one knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.7 * x)


class Step(nn.Module):
    """An activation whose slope jumps, which its name does not say."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.01 * x)


class DropPath(nn.Module):
    """Drops all of a row's branch, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.arange(x.shape[0], device=x.device) != 0
        return x * kept.view(-1, 1, 1) * 1.5


class LayerScale(nn.Module):
    """Scales each channel of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    """Attention with one projection or three, by torch's function or by its parts."""

    def __init__(self, how: SimpleNamespace) -> None:
        super().__init__()
        self.how = how
        self.heads = HEADS
        self.window = how.window
        self.factors = [1.0]
        self.factor = SIZE**-0.5
        kv = HEADS // 2 if how.grouped else HEADS
        self.few = kv
        if how.one:
            self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv) * SIZE)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, n * SIZE) for n in (HEADS, kv, kv))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(how.attention_dropout)
        self.q_norm = nn.LayerNorm(SIZE) if how.query_norm else nn.Identity()
        self.out_drop = nn.Dropout(how.dropout)
        tril = torch.ones(64, 64).tril().view(1, 1, 64, 64)
        self.register_buffer("tril", tril)
        self.register_buffer("later", 1 - tril[0, 0])
        self.register_buffer("band", tril.triu(-how.window))

    def projected(self, x: Tensor) -> list[Tensor]:
        rows, tokens, _ = x.shape
        if not self.how.one:
            found = [(self.q(x), self.heads), (self.k(x), self.few), (self.v(x), self.few)]
            return [y.view(rows, tokens, n, -1).transpose(1, 2) for y, n in found]
        if self.how.interleaved:
            y = self.qkv(x).reshape(rows, tokens, self.heads, 3, -1)
            q, k, v = y.permute(3, 0, 2, 1, 4).unbind(0)
            return [q, k, v]
        if self.how.grouped:
            sizes = [self.heads * SIZE, self.few * SIZE, self.few * SIZE]
            q, k, v = self.qkv(x).split(sizes, -1)
            return [y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (q, k, v)]
        y = self.qkv(x).reshape(rows, tokens, 3, self.heads, WIDTH // self.heads)
        y = y.permute(2, 0, 3, 1, 4)
        return [y[0], y[1], y[2]]

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        how = self.how
        if how.torchs:
            p = how.attention_dropout if self.training else 0.0
            mask = None
            if how.window:
                mask = self.band[0, 0, : q.size(-2), : q.size(-2)].bool()
            options = {"is_causal": how.causal and mask is None, "enable_gqa": how.grouped}
            return F.scaled_dot_product_attention(q, k, v, mask, p, **options)
        scores = (q * self.factor) @ k.transpose(-2, -1) * self.factors[0]
        if how.causal:
            tokens = q.shape[2]
            if how.in_place:
                scores.masked_fill_(self.later.bool()[:tokens, :tokens], -torch.inf)
            else:
                mask = (self.band if how.window else self.tril)[:, :, :tokens, :tokens]
                scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.drop(scores.softmax(dim=-2 if how.other_softmax else -1)) @ v

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        if self.how.fixed:
            x = x.view(rows, -1, 8, width).flatten(1, 2)
        q, k, v = self.projected(x)
        if self.how.swapped:
            k, v = v, k
        y = self.attended(self.q_norm(q), k, v)
        if self.how.seen:
            self.last = y
        if not self.how.heads_first:
            y = y.transpose(1, 2)
        return self.out_drop(self.proj(y.reshape(rows, tokens, width)))


class Block(nn.Module):
    """A block that adds what attention and a feed-forward part make of norms."""

    def __init__(self, how: SimpleNamespace) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = self.norms()
        self.attn = Attention(how)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            _ACTIVATIONS[how.activation](),
            *([nn.Dropout(how.dropout)] if how.inner_dropout else []),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.path = DropPath() if how.path else nn.Identity()
        self.scale = LayerScale() if how.layer_scale else nn.Identity()
        self.share = 0.5
        if how.skips_by_own:
            self.source = random.Random(0)

    def norms(self) -> list[nn.Module]:
        kinds: dict[str, Callable[[], nn.Module]] = {
            "own": lambda: OwnNorm(bias=False),
            "own_bias": lambda: OwnNorm(bias=True),
            "torchs": lambda: nn.LayerNorm(WIDTH),
            "rms": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
            "hand": NormByHand,
        }
        return [kinds[self.how.norm]() for _ in range(2)]

    def attended(self, x: Tensor) -> Tensor:
        if self.how.checkpointed:
            result: Tensor = checkpoint(self.attn, x, use_reentrant=False)
        else:
            result = self.attn(x)
        return result

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        how = self.how
        if how.skips and random.random() < 0.0:
            return x
        if how.skips_as_torch and torch.rand(1) < 0.0:
            return x
        if how.skips_by_own and self.source.random() < 0.0:
            return x
        graded = torch.is_grad_enabled() and not how.frozen
        in_float = torch.autocast("cpu", enabled=False) if how.in_float else nullcontext()
        with torch.set_grad_enabled(graded), in_float:
            branch = self.attended(self.first(x))
        if mask is not None:
            branch = branch * mask
        if how.by_length and x.shape[1] > TOKENS:
            branch = branch * 0
        if how.half:
            branch = self.share * branch
        if how.writes:
            seen = branch
            branch *= 0.5
            branch = branch + seen
        middle = x + self.path(self.scale(branch))
        if how.parallel:
            return middle + self.mlp(self.second(x))
        y = self.second(middle) if not how.post else middle
        y = F.dropout(self.mlp(y), how.dropout, self.training)
        y = self.path(self.scale(y))
        y = y + middle
        return self.second(y) if how.post else y


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "swish": Swish,
    "step": Step,
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "norm": ("own", "own_bias", "torchs", "rms", "hand"),
    "one": (True, False),
    "torchs": (True, False),
    "causal": (True, False),
    "grouped": (False, True),
    "swapped": (False, True),
    "path": (False, True),
    "layer_scale": (False, True),
    "activation": ("gelu", "gelu_tanh", "silu", "relu", "swish", "step"),
    "inner_dropout": (False, True),
    "in_place": (False, True),
    "dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
}
# What is not read, each by itself.
STRANGE = {
    "interleaved": "another order",
    "window": "uses attn.band",
    "query_norm": "another order",
    "other_softmax": "softmax",
    "heads_first": "another order",
    "parallel": "norms or its sums",
    "post": "has norm",
    "by_length": "cannot be read",
    "half": "not known there",
    "seen": "which may have a state",
    "writes": "calls imul",
    "fixed": "cannot be read",
    "skips": "draws random numbers",
    "skips_as_torch": "draws random numbers",
    "skips_by_own": "has source",
    "frozen": "switches gradients",
    "checkpointed": "is checkpointed",
    "in_float": "switches gradients or autocast",
}
OF_PARTS = ("other_softmax",)  # what attention by torch's function does not have


def made(**options: Any) -> SimpleNamespace:
    first = {name: choices[0] for name, choices in CHOICES.items()}
    return SimpleNamespace(**{**first, **dict.fromkeys(STRANGE, False), **options})


def model_of(how: SimpleNamespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(how), Block(how), nn.Linear(WIDTH, 3)).train()


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the result and all gradients, of a call without dropout."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    dropouts = [each for each in model.modules() if isinstance(each, nn.Dropout)]
    probabilities = [each.p for each in dropouts]
    for each in dropouts:
        each.p = 0.0
    y = model(x)
    y.square().mean().backward()
    for each, p in zip(dropouts, probabilities, strict=True):
        each.p = p
    gradients = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [y.detach(), *(g.clone() for g in gradients if g is not None)]


def far(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected)
    largest = max(float(b.norm()) for b in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / (b.norm() + 1e-3 * largest)) for a, b in pairs)


def batch(tokens: int = TOKENS) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def fused_blocks(report: vramx.OptimizeReport) -> int:
    return sum("PlainBlock" in row.reason for row in report.rows)
