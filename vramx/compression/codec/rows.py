"""Rows that share groups, packed as roots of what they are of their own largest element.

A layer adds up the rows of what it reads, and a norm or a loss behind it may make small rows count
as much as large ones: those of tokens beside what stands for padding, of nodes with one neighbour
beside those with a thousand. In a group with a row of 300 times its scale nothing is left of a
small one: the gradient of a layer had a cosine of 0.5 with the exact one. Rows whose length is a
multiple of 32 have groups of their own (plans.py). Any others have groups as elements lie, and a
scale each: four bytes a row, and one reduction over the elements before they are packed.

A convolution of channels by themselves adds up each of them, and where they lie together in memory
it is columns that a norm behind it makes count alike. These are packed as roots, too: beside
some of 100 times their scale the gradient of a weight had a cosine of 0.8.

Roots, as of powers: whatever reads a row, its elements are packed once. Pure but for the scales
that a Scaled holds; any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vramx.compression import packs
from vramx.compression.codec.roots import ROOT
from vramx.compression.policy.calls import Operation
from vramx.kernels.launch import Function

# Bytes of a row's elements of which its scale is at most a quarter: beside the codes and headers of
# bfloat16 half of what they leave.
_LEAST_BYTES = 16
_SCALE_BYTES = 4
_MOST_OF_ROWS = 3  # dimensions
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})
_LIMITS = torch.finfo(torch.float32)
_FLOAT16_MAX = torch.finfo(torch.float16).max


def shared_row(tensor: Tensor) -> int:
    """Return how many elements a row has that may share a group with another; 0: no rows do.

    Of a matrix or three dimensions: more are an image's, whose pixels are as large as each other.

    Example:
        >>> shared_row(torch.zeros(4, 6)), shared_row(torch.zeros(1, 6))
        (6, 0)
    """
    return row_length(tensor) if 2 <= tensor.dim() <= _MOST_OF_ROWS else 0


def pixel_length(tensor: Tensor, operation: Operation) -> int:
    """Return how many channels a pixel has that a layer of pixels reads where they lie together.

    A convolution with a kernel of one is a linear layer, and pixels are its rows.

    Example:
        >>> x, weight = torch.zeros(2, 3, 4, 4), torch.zeros(8, 3, 1, 1)
        >>> last = x.to(memory_format=torch.channels_last)
        >>> [pixel_length(each, Operation("conv2d", (each, weight), {})) for each in (x, last)]
        [0, 3]
    """
    if tensor.dim() <= _MOST_OF_ROWS or tensor.stride(1) != 1 or not is_of_pixels(operation):
        return 0
    return int(tensor.shape[1])


def is_of_pixels(operation: Operation) -> bool:
    """Tell whether an operation is a convolution with a kernel of one."""
    if operation.name not in CONVOLUTIONS or operation.custom:
        return False
    weight = operation.argument(1)
    return weight is not None and all(n == 1 for n in weight.shape[2:])


def reads_columns(tensor: Tensor, operation: Operation) -> bool:
    """Tell whether a convolution reads channels by themselves that lie together in memory.

    Example:
        >>> x, weight = torch.zeros(2, 5, 3), torch.zeros(3, 1, 4)
        >>> [
        ...     reads_columns(each, Operation("conv1d", (each, weight), {"groups": 3}))
        ...     for each in (x.transpose(1, 2), x.transpose(1, 2).contiguous())
        ... ]
        [True, False]
    """
    if operation.name not in CONVOLUTIONS or operation.custom:
        return False
    weight = operation.argument(1)
    if weight is None or weight.dim() != tensor.dim() or weight.shape[1] != 1:
        return False
    return tensor.shape[1] == weight.shape[0] > 1 and tensor.stride(1) == 1


def row_length(tensor: Tensor) -> int:
    """Return how many elements a row has, those of the dimension next in memory; 0: it is one row.

    Of one element a dimension has no order; a matrix of one column has rows all the same.

    Example:
        >>> x = torch.zeros(4, 6)
        >>> [row_length(each) for each in (x, x.t(), x.unsqueeze(-1), x[:, :1], x[:1])]
        [6, 6, 6, 1, 0]
    """
    size = tensor.shape
    if len(size) == 2 and size[1] == 1:
        return int(size[0] > 1)
    # One that is expanded is not in memory.
    moving = [n for n in zip(tensor.stride(), size, strict=True) if n[0] and n[1] > 1]
    return min(moving)[1] if len(moving) > 1 else 0


def is_too_short(tensor: Tensor, length: int) -> bool:
    """Tell whether a scale for each row would take more than it leaves to gain.

    Example:
        >>> [is_too_short(torch.zeros(4, 6, dtype=t), 6) for t in (torch.bfloat16, torch.float32)]
        [True, False]
    """
    return length * tensor.element_size() < _LEAST_BYTES


class Scaled:
    """The roots of rows of a length, each divided by its largest magnitude.

    Args:
        factors: fp32 [rows], what a row is multiplied by: the reciprocal of that; one that is no
            positive normal number counts as 1 (of zeros and infinities); NaN makes its row NaN.
    """

    __slots__ = ("_factors", "function")

    def __init__(self, factors: Tensor, length: int) -> None:
        self._factors = factors
        self.function = Function("scaled", None, factors, length, factors.numel())

    @property
    def nbytes(self) -> int:
        return self._factors.numel() * _SCALE_BYTES

    def of(self, elements: Tensor) -> Tensor:
        numbers = self._rows(elements).float() * self._usable()
        return ROOT.of(numbers.view(-1))

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        found = ROOT.back(numbers, torch.float32)
        self._rows(found).mul_(self._usable().reciprocal_())
        if dtype is torch.float16:  # as its kernel
            found.clamp_(-_FLOAT16_MAX, _FLOAT16_MAX)
        return found.to(dtype)

    def _rows(self, elements: Tensor) -> Tensor:
        return elements.view(self.function.period, self.function.inner)

    def _usable(self) -> Tensor:
        factors = self._factors
        useless = (factors < _LIMITS.tiny) | (factors > _LIMITS.max)
        return torch.where(useless, 1.0, factors)[:, None]


def scaled(elements: Tensor, length: int) -> Scaled:
    """Return what packs a contiguous tensor, of any shape and with its graph, in rows of a length.

    Memory: four bytes a row, which are kept; temporary: up to as much.
    """
    rows = elements.detach().view(-1, length)
    # The largest magnitude, in one pass, and NaN of what has one.
    largest = torch.linalg.vector_norm(rows, torch.inf, 1).float()
    return Scaled(packs.made(largest.reciprocal_()), length)
