"""Inputs of norms that subtract a mean, packed as roots of what is normalised.

Normalised is (x - mean) / deviation; of magnitudes above 4 halves are packed.

Backward subtracts the mean again and divides by the deviation. Where the mean is many deviations, a
step of a packed x is many as well, and nothing is left of the gradient; and a group of channels or
rows that differ in scale has the step of the largest. Normalised they are all alike, so that a
group may have any of them, and their numbers take no more bytes than x would have taken. Of these
roots.py's roots are packed: the gradient of the norm's weight is a sum of products with them, and
what follows may leave only the small ones in it. Behind tanh(30 * norm(x)) it was off by 45 % with
steps of the same size, and is by 7 with roots, 10 in bfloat16; behind a layer by 0.8 with either.

Norms save their input first, and mean and deviation with their result. What stands for the input,
a Pending, holds the input itself until the call ends. Where no statistics are found it stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from vramx.compression.codec.geometry import Geometry, covered_bytes, describe, restore
from vramx.compression.codec.roots import ROOT_OF_MOST
from vramx.compression.policy.calls import Operation
from vramx.compression.saved import Pending, Reference, Restored
from vramx.kernels.launch import Function

_OF_ROWS = frozenset({"layer_norm", "native_layer_norm"})
_OF_GROUPS = frozenset({"group_norm", "native_group_norm"})
_OF_CHANNELS = frozenset(
    {
        *("batch_norm", "instance_norm", "native_batch_norm"),
        *("cudnn_batch_norm", "miopen_batch_norm"),
    }
)
MEAN_NORMS = _OF_ROWS | _OF_GROUPS | _OF_CHANNELS
# Keeps the reciprocal of a deviation finite; packing and unpacking use the same, whatever it is.
_EPSILON = 1e-5
_LIMITS = torch.finfo(torch.float32)
_MOST = 1 << 30  # with a tile more, numbers of a kernel still fit into 32 bits


class Statistics(NamedTuple):
    """What a norm subtracts and multiplies by, of what has the sizes `ones`; x has `size`.

    `rstd` is the reciprocal of the deviation; an element that is no positive normal number counts
    as 1 (of infinities, and of equal numbers without an epsilon).
    """

    mean: Tensor
    rstd: Tensor
    size: tuple[int, ...]
    ones: tuple[int, ...]

    @property
    def kind(self) -> Hashable:
        """What is normalised together: of one x, statistics of one kind are equal."""
        return self.size, self.ones


class Normal:
    """The roots of x, which lies as its geometry says, normalised by statistics."""

    __slots__ = ("_geometry", "_statistics", "function")

    def __init__(self, statistics: Statistics, geometry: Geometry) -> None:
        self._statistics = statistics
        self._geometry = geometry
        self.function = _function(statistics, geometry)

    @property
    def nbytes(self) -> int:
        """The bytes of the statistics, which lie beside what is packed."""
        mean, rstd, *_ = self._statistics
        return covered_bytes(mean) + covered_bytes(rstd)

    def of(self, elements: Tensor) -> Tensor:
        mean, factor = self._factors()
        numbers = torch.empty_like(elements, dtype=torch.float32)
        torch.sub(self._seen(elements), mean, out=self._seen(numbers)).mul_(factor)
        return ROOT_OF_MOST.of(numbers)

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        mean, factor = self._factors()
        numbers = ROOT_OF_MOST.back(numbers, torch.float32)
        normal = self._seen(numbers)
        torch.addcmul(mean, normal, factor.reciprocal_(), out=normal)
        return numbers.to(dtype)

    def _seen(self, elements: Tensor) -> Tensor:
        """Return a flat range as x lies in it."""
        return restore(elements, self._geometry).view(self._statistics.size)

    def _factors(self) -> tuple[Tensor, Tensor]:
        mean, rstd, _, ones = self._statistics
        rstd = rstd.float()
        useless = (rstd < _LIMITS.tiny) | (rstd > _LIMITS.max)
        return mean.float().view(ones), torch.where(useless, 1.0, rstd).view(ones)


def _function(statistics: Statistics, geometry: Geometry) -> Function | None:
    """Return the function as the kernels know it, where statistics repeat as they want it."""
    mean, rstd, size, ones = statistics
    if mean.dtype is not torch.float32 or rstd.dtype is not torch.float32:
        return None
    found = _repetition(geometry.size, geometry.stride, size, ones)
    if found is None or not mean.is_contiguous() or not rstd.is_contiguous():
        return None
    return Function("normal", mean, rstd, *found)


@lru_cache(maxsize=1024)
def _repetition(
    size: tuple[int, ...], stride: tuple[int, ...], split: tuple[int, ...], ones: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return how many elements in a row have one statistic, and how many statistics take turns.

    In memory: x has a size and a stride there, and is seen in the sizes `split`. None where the
    statistics do not follow each other in their own order.

    Example:
        >>> _repetition((2, 3, 4), (12, 4, 1), (2, 3, 4), (1, 3, 1))
        (4, 3)
        >>> _repetition((2, 3, 4), (12, 1, 3), (2, 3, 4), (1, 3, 1))
        (1, 3)
        >>> _repetition((2, 3, 4), (4, 8, 1), (2, 3, 4), (2, 3, 1)) is None
        True
    """
    steps = _steps(size, stride, split)
    dims = [d for d in sorted(range(len(split)), key=lambda d: steps[d]) if split[d] > 1]
    varying = [d for d in dims if ones[d] > 1]
    inner = count = 1
    for place, dim in enumerate(dims):
        if dim not in varying:
            inner *= split[dim] if count == 1 else 1
        elif varying != dims[place : place + len(varying)] and count == 1:
            return None
        else:
            count *= split[dim]
    in_order = varying == sorted(varying, reverse=True)
    return (inner, count) if in_order and max(inner, count) <= _MOST else None


def _steps(size: tuple[int, ...], stride: tuple[int, ...], split: tuple[int, ...]) -> list[int]:
    """Return the strides of a view in which dimensions are split.

    Example:
        >>> _steps((2, 6), (6, 1), (2, 3, 2))
        [6, 2, 1]
    """
    steps = [0] * len(split)
    place = 0
    for length, step in zip(size, stride, strict=True):
        left = length
        while left > 1:
            left //= split[place]
            steps[place] = step * left
            place += 1
    return steps


class Waiting:
    """The input of a norm whose call goes on, and what the call has saved since.

    `later` gets what is saved after the input. `pack` is called with the operation when that has
    ended and `statistics` are known; None: none were found.
    """

    __slots__ = ("_pack", "_tensor", "later", "pending", "statistics")

    def __init__(self, tensor: Tensor, pack: Callable[[Operation], Reference | Restored]) -> None:
        self.pending = Pending(tensor)
        self.statistics: Statistics | None = None
        self._tensor = tensor
        self._pack = pack
        self.later: list[Tensor] = []

    def end(self, operation: Operation) -> None:
        """Pack the input, now that the call has ended; a trace would have what packs it."""
        if torch._C._get_tracing_state() is not None:
            return
        numbers = [each for each in self.later if each.is_floating_point()]
        self.statistics = _statistics(self._tensor, operation, numbers)
        self.pending.held = self._pack(operation)


def _statistics(x: Tensor, operation: Operation, later: list[Tensor]) -> Statistics | None:
    """Return the statistics among what was saved after x: its last two tensors.

    An evaluated norm saves two empty ones. It divides by running deviations, which may be far from
    what x has, as its channels then are from each other: those of x are computed, from the running
    mean. What is near that has a small part in the gradient of the weight, and has to keep it where
    what follows leaves nothing else.
    """
    name = operation.name
    if len(later) < 2 or x.dim() < 2 or describe(x).covered != x.numel():
        return None
    mean, rstd = later[-2:]
    if mean.numel() == 0 and name in _OF_CHANNELS:
        mean, rstd = _of_channels(x.detach(), _running_mean(operation))
    sizes = _sizes(x.shape, name, mean.shape)
    if sizes is None or mean.numel() != rstd.numel():
        return None
    return Statistics(_without_graph(mean), _without_graph(rstd), *sizes)


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach()


def _running_mean(operation: Operation) -> Tensor | None:
    position = 1 if operation.name in ("batch_norm", "instance_norm") else 3
    found = operation.option(position, "running_mean", None)
    # A copy: a later call may move it before backward runs.
    return found.detach().to(torch.float32, copy=True) if type(found) is Tensor else None


def _of_channels(x: Tensor, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the reciprocal deviation of channels from a center, or their mean, and that.

    Of what they are, rounded as x is. Not the variance: in float16 it would be infinite from
    deviations of 256 on.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    deviation, mean = torch.std_mean(x, dims, correction=0)
    mean = mean.float()
    square = deviation.float().square() + _EPSILON
    if center is None or center.shape != mean.shape:
        return mean, square.rsqrt()
    return center, (square + (mean - center).square()).rsqrt()


@lru_cache(maxsize=1024)
def _sizes(
    size: tuple[int, ...], name: str, means: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the size of x, its channels in groups where these are normalised, and of its means."""
    if name in _OF_ROWS:
        # Means of rows have the dimensions that were normalised, too, of size 1.
        return (size, means) if len(means) == len(size) else None
    if name in _OF_GROUPS:
        groups = prod(means) // size[0]
        if not groups or size[1] % groups:
            return None
        split = (size[0], groups, size[1] // groups, *size[2:])
        sizes = split, (size[0], groups, *(1,) * (len(split) - 2))
    else:
        sizes = size, (1, size[1], *(1,) * (len(size) - 2))
    return sizes if prod(means) == prod(sizes[1]) else None
