"""Chunks of tokens of linear_cross_entropy: their logits, their losses, and the sums of gradients.

One buffer has each chunk's logits in turn, over which the kernel writes their gradient. No state;
any thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vramx.kernels import cross_entropy_launch as launch
from vramx.nn import keeping
from vramx.nn import reference_elementwise as reference

# The gradient of weight is read and written once a chunk: 4 bytes a weight beside 6 operations a
# weight and token. At 2048 tokens that is 6 % of the time of an H200's products, at 512 a quarter.
_TOKENS_OF_CHUNK = 2048
_LOGITS_BYTES = 512 << 20
_TOKENS_MULTIPLE = 128  # of the products' tiles
_ACCESS_BYTES = 16


@dataclass(frozen=True)
class Options:
    """What an operator's list of floats says: a schema has no other room for it."""

    ignored: int
    smoothing: float
    cap: float | None
    chunk: int

    @classmethod
    def of(cls, settings: Sequence[float]) -> Options:
        """Read an operator's settings."""
        ignored, smoothing, cap, chunk = settings
        return cls(int(ignored), smoothing, cap or None, int(chunk))

    @property
    def of_kernel(self) -> launch.LossOptions:
        """What of them the kernel takes."""
        return launch.LossOptions(self.ignored, self.smoothing, self.cap)


def chunk_tokens(rows: Tensor, weight: Tensor, chunk: int) -> int:
    """Return the tokens of a chunk: what was asked for, or for 0 chunks of about equal size."""
    if chunk:
        return chunk
    most = min(_TOKENS_OF_CHUNK, _LOGITS_BYTES // max(1, weight.shape[0] * rows.element_size()))
    chunks = -(-rows.shape[0] // max(most, _TOKENS_MULTIPLE))
    even = -(-rows.shape[0] // max(1, chunks))
    return max(1, -(-even // _TOKENS_MULTIPLE)) * _TOKENS_MULTIPLE


class Chunk(NamedTuple):
    """Some tokens, and memory that the next chunk has too."""

    part: slice
    logits: Tensor
    mail: Tensor | None


def chunks_of(
    rows: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Iterator[Chunk]:
    """Yield each chunk with its logits."""
    tokens = min(chunk_tokens(rows, weight, options.chunk), rows.shape[0])
    buffer = empty_logits(rows, tokens, weight.shape[0])
    mail = launch.new_mail(buffer, options.of_kernel) if _is_served(buffer) else None
    for start in range(0, rows.shape[0], max(1, tokens)):
        part = slice(start, min(start + tokens, rows.shape[0]))
        logits = buffer[: part.stop - start]
        if bias is None:
            torch.mm(rows[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, rows[part], weight.t(), out=logits)
        yield Chunk(part, logits, mail)


def empty_logits(rows: Tensor, tokens: int, classes: int) -> Tensor:
    """Return memory for logits whose rows begin at multiples of 16 bytes.

    From elsewhere matrix products would read and write some bytes at a time. What is behind the
    rows is zero: oneDNN's products in bfloat16 on processors with AMX multiply it by zero and add
    the result, which is NaN where the memory held a NaN (torch 2.13).
    """
    multiple = _ACCESS_BYTES // rows.element_size()
    memory = rows.new_empty(tokens, -(-classes // multiple) * multiple)
    memory[:, classes:].zero_()
    return memory[:, :classes]


def _is_served(logits: Tensor) -> bool:
    return keeping.served(logits) and launch.fits(logits)


def evaluate(
    chunk: Chunk, targets: Tensor, losses: Tensor, options: Options, gradient: Tensor | bool
) -> None:
    """Write the losses, and over the logits their gradients, weighted if `gradient` is a tensor.

    Targets and losses are of all tokens, the weights of the chunk's.
    """
    logits, targets, losses = chunk.logits, targets[chunk.part], losses[chunk.part]
    if _is_served(logits):
        rows = launch.LossRows(targets, losses, chunk.mail)
        launch.cross_entropy(logits, rows, options.of_kernel, gradient)
        return
    values, change = reference.cross_entropy(
        logits, targets, options.ignored, options.smoothing, options.cap
    )
    losses.copy_(values)
    if gradient is not False:
        logits.copy_(change * gradient[:, None] if isinstance(gradient, Tensor) else change)


class Gradients:
    """The sums over chunks of the gradients that are needed; empty tensors for the others."""

    def __init__(self, rows: Tensor, weight: Tensor, needs: Sequence[bool]) -> None:
        self._needs = needs
        self._rows, self._weight = rows, weight
        sums = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        self.hidden = rows.new_empty(rows.shape if needs[0] else 0)
        shape = weight.shape if needs[1] else (0,)
        self.weight = torch.zeros(shape, dtype=sums, device=rows.device)
        size = weight.shape[0] if needs[2] else 0
        self.bias = torch.zeros(size, dtype=reference.wide(rows[:0]).dtype, device=rows.device)

    def add(self, part: slice, change: Tensor) -> None:
        """Add what the gradient of a chunk's logits gives."""
        if self._needs[0]:
            torch.mm(change, self._weight, out=self.hidden[part])
        if self._needs[1]:
            rows = self._rows[part]
            if self.weight.dtype == rows.dtype:
                self.weight.addmm_(change.t(), rows)
            else:
                self.weight.add_(change.t() @ rows)
        if self._needs[2]:
            self.bias += change.sum(0, dtype=self.bias.dtype)
