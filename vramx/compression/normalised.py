"""Inputs of norms that subtract a mean, packed as what is normalised: (x - mean) / deviation.

Backward subtracts the mean again and divides by the deviation. Where the mean is many deviations, a
step of a packed x is many as well, and nothing is left of the gradient; and a group of channels or
rows that differ in scale has the step of the largest. Normalised they are all alike, so that a
group may have any of them, and their numbers take no more bytes than x would have taken.

Norms save their input first, and mean and deviation with their result. What stands for the input,
a Pending, holds the input itself until the call ends. Where no statistics are found it stays so.
Another codec keeps the numbers; an elementwise operation in float32 beside what that codec costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from vramx.compression.calls import Operation
from vramx.compression.config import Format
from vramx.compression.geometry import Geometry, describe, restore
from vramx.compression.saved import Codec, Payload, Pending, Reference, Restored

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


class Statistics(NamedTuple):
    """What a norm subtracts and divides by, as float32 that broadcasts over x of size `size`."""

    mean: Tensor
    deviation: Tensor
    size: tuple[int, ...]

    @property
    def kind(self) -> Hashable:
        """What is normalised together: of one x, statistics of one kind are equal."""
        return self.size, self.mean.shape

    def of(self, elements: Tensor, geometry: Geometry) -> Tensor:
        """Return a flat range as x lies in it."""
        return restore(elements, geometry).view(self.size)


class Normalised(NamedTuple):
    """The packed numbers, and how they become x again."""

    payload: Payload
    statistics: Statistics
    geometry: Geometry
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes


class NormalCodec:
    """Keeps the input of a norm normalised, with another codec for the numbers."""

    def __init__(self, codec: Codec, statistics: Statistics, geometry: Geometry) -> None:
        self._codec = codec
        self._statistics = statistics
        self._geometry = geometry

    def encode(self, elements: Tensor, format: Format) -> Normalised:
        statistics, geometry = self._statistics, self._geometry
        numbers = torch.empty_like(elements, dtype=torch.float32)
        normal = statistics.of(numbers, geometry)
        torch.sub(statistics.of(elements, geometry), statistics.mean, out=normal)
        normal.div_(statistics.deviation)
        payload = self._codec.encode(numbers, format)
        return Normalised(payload, statistics, geometry, elements.dtype)

    def decode(self, payload: Normalised) -> Tensor:
        numbers = self._codec.decode(payload.payload)
        mean, deviation, _ = statistics = payload.statistics
        normal = statistics.of(numbers, payload.geometry)
        torch.addcmul(mean, normal, deviation, out=normal)
        return numbers.to(payload.dtype)


class Waiting:
    """The input of a norm whose call goes on, and what the call has saved since.

    `pack` is called with the operation when that has ended and `statistics` are known; None: none
    were found.
    """

    __slots__ = ("_later", "_pack", "_tensor", "pending", "statistics")

    def __init__(self, tensor: Tensor, pack: Callable[[Operation], Reference | Restored]) -> None:
        self.pending = Pending(tensor)
        self.statistics: Statistics | None = None
        self._tensor = tensor
        self._pack = pack
        self._later: list[Tensor] = []

    def note(self, tensor: Tensor) -> None:
        """Note what is saved after the input."""
        if tensor.is_floating_point():
            self._later.append(tensor.detach())

    def end(self, operation: Operation) -> None:
        """Pack the input, now that the call has ended."""
        with torch.no_grad():
            self.statistics = _statistics(self._tensor, operation.name, self._later)
        self.pending.held = self._pack(operation)


def _statistics(x: Tensor, name: str, later: list[Tensor]) -> Statistics | None:
    """Return the statistics among what was saved after x: its last two tensors.

    An evaluated norm saves two empty ones; it uses the running ones, which are the first two.
    """
    geometry = describe(x)
    if len(later) < 2 or x.dim() < 2 or geometry.covered != x.numel():
        return None
    mean, rstd = later[-2:]
    if mean.numel() == 0 and name in _OF_CHANNELS:
        mean, rstd = later[0].clone(), (later[1].float() + _EPSILON).rsqrt()
    sizes = _sizes(x, name, mean)
    if sizes is None or mean.numel() != rstd.numel() or mean.numel() != prod(sizes[1]):
        return None
    size, ones = sizes
    deviation = rstd.float().reciprocal().view(ones)
    # Of infinities, and of equal numbers without an epsilon.
    usable = deviation.isfinite() & (deviation > 0)
    return Statistics(mean.float().view(ones), torch.where(usable, deviation, 1.0), size)


def _sizes(x: Tensor, name: str, mean: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the size of x, its channels in groups where these are normalised, and of its means."""
    size = tuple(x.shape)
    if name in _OF_ROWS:
        # Means of rows have the dimensions that were normalised, too, of size 1.
        return (size, tuple(mean.shape)) if mean.dim() == x.dim() else None
    if name in _OF_GROUPS:
        groups = mean.numel() // size[0]
        if not groups or size[1] % groups:
            return None
        split = (size[0], groups, size[1] // groups, *size[2:])
        return split, (size[0], groups, *(1,) * (len(split) - 2))
    return size, (1, size[1], *(1,) * (len(size) - 2))
