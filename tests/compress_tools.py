"""What the tests of compression share: small modules, their gradients, and bytes that are held."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from vramx.compression import session
from vramx.compression.codec import codec
from vramx.compression.hooks import compress
from vramx.compression.saved import decoded_copies
from vramx.compression.session import PlainCodec
from vramx.compression.stats import CompressionStats


class Attention(nn.Module):
    """Three projections of one input, heads that are transposed views, an output projection.

    Keys have no bias, so that what attention keeps may be packed.
    """

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, width, bias=each != "k") for each in "qkvo"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = functional.scaled_dot_product_attention(
            split(self.q(x)), split(self.k(x)), split(self.v(x))
        )
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block with everything that a real one saves."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


def gradient(
    module: nn.Module, x: torch.Tensor, context: AbstractContextManager[Any] | None = None
) -> torch.Tensor:
    """Return the gradient of all parameters, flat, of a forward pass in `context`."""
    module.zero_grad()
    torch.manual_seed(7)  # of dropout
    x = x.detach().requires_grad_() * 1.0  # no leaf, as activations are
    with context or contextlib.nullcontext():
        y = module(x)
    y.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def worst_cosine(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """Return the least cosine of a gradient with the exact one."""
    return min(
        float(functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))
        for a, b in zip(found, exact, strict=True)
    )


def held_bytes(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the bytes of host memory that a call of `function` took and did not give back."""
    # The first run of a profiler allocates for itself.
    with torch.profiler.profile(profile_memory=True, activities=[_CPU]):
        torch.empty(1)
    with torch.profiler.profile(profile_memory=True, activities=[_CPU]) as profile:
        result = function()
    events = profile.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]"), result


_CPU = torch.profiler.ProfilerActivity.CPU


@contextlib.contextmanager
def recorded_packs(monkeypatch: Any) -> Iterator[list[torch.Tensor]]:
    """Give a list that gets a copy of every flat range that is packed."""
    packed: list[torch.Tensor] = []
    original = PlainCodec.encode

    def encode(self: PlainCodec, elements: torch.Tensor, format: Any, mapping: Any = None) -> Any:
        flat = elements.detach().reshape(-1).clone()
        packed.append(flat if mapping is None else mapping.of(flat))
        return original(self, elements, format, mapping)

    with monkeypatch.context() as patch:
        patch.setattr(PlainCodec, "encode", encode)
        yield packed


def packs_of(
    function: Callable[[], Any], monkeypatch: Any, **options: Any
) -> tuple[list[torch.Tensor], CompressionStats]:
    """Return what a call packs, and its counts; what the call gives is held till its end."""
    with (
        recorded_packs(monkeypatch) as packed,
        compress(**{"min_bytes": 0, **options}) as stats,
    ):
        result = function()
    del result
    return packed, stats


@contextlib.contextmanager
def recorded_decodes(monkeypatch: Any) -> Iterator[list[codec.Packed]]:
    """Give a list that gets every payload that is decoded."""
    decoded: list[codec.Packed] = []
    original = PlainCodec.decode

    def decode(self: PlainCodec, payload: codec.Packed, *geometry: Any) -> torch.Tensor:
        decoded.append(payload)
        return original(self, payload, *geometry)

    with monkeypatch.context() as patch:
        patch.setattr(PlainCodec, "decode", decode)
        yield decoded


def table() -> session.Table:
    """Return what this thread's contexts find kept memory in."""
    return session._thread.table


def check_that_nothing_is_left() -> None:
    """Assert that nothing outlived the graphs of a test."""
    if len(table()) or len(decoded_copies):
        gc.collect()  # of what a test that failed, or was interrupted, left in a traceback
    assert len(table()) == 0
    assert len(decoded_copies) == 0


def input_of(*shape: int) -> torch.Tensor:
    """Return data that is no leaf, as activations are."""
    torch.manual_seed(3)
    return torch.randn(*shape, requires_grad=True) * 1.0
