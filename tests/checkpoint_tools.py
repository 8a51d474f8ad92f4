"""What the tests of vramx.checkpoint share: a block to recompute, its gradients, what was packed.

Fixtures are here too; a file names those that it uses in `__all__`, and has all of its tests use
`seeds`. A gradient is that of a block of some 33 thousand parameters: milliseconds.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx import errors
from vramx.compression.codec import codec
from vramx.compression.config import Compression
from vramx.errors import VramxWarning
from vramx.recompute import inputs

SMALL = Compression(min_bytes=0)
WIDTH = 64
Tensors = Sequence[torch.Tensor]
LEVELS = pytest.mark.parametrize("level", ["keep", SMALL], ids=["exact", "int8"])


def bent(x: torch.Tensor) -> torch.Tensor:
    """Return what is smooth in x, has a slope that changes, and is packed as it is."""
    return F.gelu(x).cumsum(-1)


class Seen(list[Any]):
    """What a region notes of each of its runs, for a recomputation has copies of plain lists."""


class Packs:
    """What the checkpoint's hooks packed, in order; holds no tensor."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.bytes = 0

    def pack(self, elements: torch.Tensor, *arguments: Any) -> codec.Packed:
        packed = codec.pack(elements, *arguments)
        self.sizes.append(elements.numel())
        self.bytes += packed.nbytes
        weakref.finalize(packed, self._released, packed.nbytes)
        return packed

    def _released(self, nbytes: int) -> None:
        self.bytes -= nbytes


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Packs:
    seen = Packs()
    monkeypatch.setattr(inputs, "pack", seen.pack)
    return seen


@pytest.fixture
def quiet() -> Iterator[None]:
    """Ignore what is said of caches and choices, which is said anew in each test."""
    errors._said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VramxWarning)
        yield


@pytest.fixture
def seeds() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    """A residual block with dropout, whose activations are many times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        y = self.down(nn.functional.dropout(y, 0.1, training=True))
        return x + (y if scale is None else y * scale)


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call as vramx.checkpoint does, without it."""
    return function(*args, **kwargs)


def activation(*shape: int) -> torch.Tensor:
    """Return a tensor as a region gets it: with a history, and nobody else's."""
    return torch.randn(*(shape or (32, WIDTH)), requires_grad=True) * 1.0


def gradients(run: Callable[[torch.Tensor], torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of a loss through `run` in module's parameters and in the input."""
    torch.manual_seed(1)
    leaf = torch.randn(32, WIDTH, requires_grad=True)
    module.zero_grad()
    run(leaf * 1.0).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()] + [leaf.grad]


def check_near(found: Tensors, expected: Tensors, level: Any = SMALL) -> None:
    """Hold each gradient to the expected: equal at level "keep", in its direction otherwise."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if level == "keep" else cosine([one], [other]) > 0.999


def cosine(left: Tensors, right: Tensors) -> float:
    a, b = (torch.cat([t.flatten().double() for t in tensors]) for tensors in (left, right))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
