"""Several small GPTs of different seeds trained as one model, and the text that they read.

The weights of all seeds lie in one tensor, and a linear layer is one batched product: small models
leave a GPU idle between launches, and five of them launch as often as one. No seed sees another.
Weights and batches depend on the seed alone, so that runs that differ in how they keep activations
are paired. The text is the Python sources of the standard library, found where Python is installed.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm
from torch.nn.functional import scaled_dot_product_attention as attend

BYTES = 256  # the vocabulary
VALIDATION_SHARE = 10  # one file in so many
MOST_TEXT = 24 << 20
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Shape:
    """The size of each model, and of a batch of each."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    length: int = 256
    rows: int = 12


class Linear(nn.Module):
    """A linear layer of each seed, without bias; (seeds, n, inputs) to (seeds, n, outputs)."""

    def __init__(self, seeds: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(seeds, inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a norm and beside the residual."""

    def __init__(self, seeds: int, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self._shape = shape
        self.qkv = Linear(seeds, width, 3 * width)
        self.out = Linear(seeds, width, width)
        self.up = Linear(seeds, width, 4 * width)
        self.down = Linear(seeds, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attention(self.qkv(layer_norm(x, x.shape[-1:]))))
        result: Tensor = x + self.down(gelu(self.up(layer_norm(x, x.shape[-1:]))))
        return result

    def _attention(self, qkv: Tensor) -> Tensor:
        shape = self._shape
        split = qkv.view(-1, shape.length, 3, shape.heads, shape.width // shape.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        result = attend(query, key, value, is_causal=True)
        return result.transpose(1, 2).reshape(*qkv.shape[:2], shape.width)


class Gpts(nn.Module):
    """One GPT for each seed; tokens are (seeds, rows, length)."""

    def __init__(self, seeds: Sequence[int], shape: Shape) -> None:
        super().__init__()
        count, width = len(seeds), shape.width
        self.tokens = nn.Parameter(torch.empty(count, BYTES, width))
        self.places = nn.Parameter(torch.empty(count, shape.length, width))
        self.blocks = nn.ModuleList(Block(count, shape) for _ in range(shape.layers))
        self.head = Linear(count, width, BYTES)
        self._draw(seeds, shape)

    @torch.no_grad()
    def _draw(self, seeds: Sequence[int], shape: Shape) -> None:
        """Draw every seed's weights from a generator of its own."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for name, parameter in self.named_parameters():
            ends_branch = name.endswith(("out.weight", "down.weight"))
            deviation = 0.02 / (2 * shape.layers) ** 0.5 if ends_branch else 0.02
            for weights, generator in zip(parameter, generators, strict=True):
                weights.normal_(0.0, deviation, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states, (seeds, rows * length, width)."""
        count, _, length = tokens.shape
        offsets = torch.arange(count, device=tokens.device)[:, None, None] * BYTES
        x = embedding(tokens + offsets, self.tokens.flatten(0, 1))
        x = (x + self.places[:, None, :length]).flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return layer_norm(x, x.shape[-1:])

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return each seed's mean cross-entropy in nat."""
        scores = self.head(hidden).float()
        each = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        return each.view(len(targets), -1).mean(1)


def standard_library_text(most: int = MOST_TEXT) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those to validate on, of different files."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for path in _sources(root):
        text = path.read_bytes()
        is_validation = zlib.crc32(str(path.relative_to(root)).encode()) % VALIDATION_SHARE == 0
        parts[is_validation].append(text)
        total += len(text)
        if total >= most:
            break
    train, validation = (
        torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts
    )
    return train, validation


def _sources(root: Path) -> list[Path]:
    """Return the standard library's own files, in one order on all machines."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - _LEFT_OUT  # the packages beside it are many times as many
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the tokens at and after each start, and those one further."""
    places = starts[..., None] + torch.arange(length + 1, device=starts.device)
    found = text[places].long()
    return found[..., :-1].contiguous(), found[..., 1:].contiguous()


def draw_starts(text: Tensor, seeds: Sequence[int], steps: int, shape: Shape) -> Tensor:
    """Return where each seed's windows begin, (steps, seeds, rows), on the text's device."""
    last = len(text) - shape.length - 1
    drawn = [
        torch.randint(0, last, (steps, shape.rows), generator=torch.Generator().manual_seed(~seed))
        for seed in seeds
    ]
    return torch.stack(drawn, 1).to(text.device)
