"""Where the elements of a tensor lie in its storage, and how to see them again.

A saved tensor is stored as one flat range. This file finds that range for any strided tensor, gives
it as a 1-D tensor, and lays the size and the stride of the tensor over a decoded range. It decides
nothing about what is stored. Pure functions, thread-safe; a look-up, or O(number of dimensions) for
a new shape, and a copy of the elements only where a tensor leaves holes in its range.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch


class Geometry(NamedTuple):
    """How a strided tensor lies over a flat range of elements, wherever that begins.

    Equations: `span` elements of the storage, from the tensor's offset, cover it; where `whole`,
    every element of the range belongs to it (so a range is all that has to be kept), and `stride`
    is its own. Where not, the range has holes: `flat` compacts it and `stride` is of the compacted
    elements. `covered` of the elements are in memory: what is expanded or overlaps counts once.
    `dense` is the size and the stride of memory that has each element once, so that a decoded range
    may be made in them; None where elements are expanded or overlap.

    ```
    dense        [x x x x x x]     span = numel, any permutation of the dimensions
    expanded     [x x x]           span < numel, a stride is 0: the base is kept
    overlapping  [x x x x]         span < numel, as in unfold
    holes        [x . . x . .]     compacted to [x x]
    ```
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    span: int
    whole: bool
    covered: int
    dense: tuple[tuple[int, ...], tuple[int, ...]] | None


def describe(tensor: torch.Tensor) -> Geometry:
    """Return how a strided tensor lies in its storage."""
    return _describe(tensor.shape, tensor.stride())


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of a tensor; of a nested one of the strided layout, which has none, how many
    dimensions and elements it has.

    Example:
        >>> shape_of(torch.zeros(2, 3))
        (2, 3)
    """
    if tensor.is_nested and tensor.layout is torch.strided:
        return tensor.dim(), tensor.numel()
    return tuple(tensor.shape)


def covered_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of memory a strided tensor covers: of overlapping windows, once.

    Example:
        >>> covered_bytes(torch.zeros(4).expand(100, 4))
        16
    """
    return describe(tensor).covered * tensor.element_size()


def covered_elements(tensor: torch.Tensor) -> int:
    """Return how many elements a strided tensor has in memory: without what is only expanded."""
    return _unexpanded(tensor.shape, tensor.stride())


# A program saves tensors of the same few shapes in every step.
@lru_cache(maxsize=4096)
def _describe(size: tuple[int, ...], stride: tuple[int, ...]) -> Geometry:
    if 0 in size:
        return Geometry(size, stride, 0, True, 0, None)
    reach = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    covered = min(_unexpanded(size, stride), reach)
    span = 1
    # A dimension whose step is at most what the smaller ones cover leaves no hole.
    for step, count in sorted(zip(stride, size, strict=True)):
        if count == 1:
            continue
        if step > span:
            return _compacted(size, stride, covered)
        span += (count - 1) * step
    dense = (size, stride) if prod(size) == span else None
    return Geometry(size, stride, span, True, covered, dense)


@lru_cache(maxsize=4096)
def _unexpanded(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    count = 1
    for length, step in zip(size, stride, strict=True):
        count *= length if step else min(length, 1)
    return count


def _compacted(size: tuple[int, ...], stride: tuple[int, ...], covered: int) -> Geometry:
    """Return the geometry after compaction: an expanded dimension stays one, the order too."""
    compact = [0 if step == 0 else 1 for step in stride]
    span = 1
    for dim in reversed(_moving_dims(size, stride)):
        compact[dim] = span
        span *= size[dim]
    dense = (size, tuple(compact)) if prod(size) == span else None
    return Geometry(size, tuple(compact), span, False, covered, dense)


def _moving_dims(size: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the dimensions along which the address changes, the slowest first."""
    moving = [dim for dim, step in enumerate(stride) if step > 0 and size[dim] > 1]
    return sorted(moving, key=lambda dim: -stride[dim])


def flat(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return the elements as a contiguous 1-D tensor that autograd does not see.

    Memory: a view of the tensor's storage where the geometry is whole, else one compact copy.

    Example:
        >>> x = torch.arange(6.0).view(2, 3).t()
        >>> flat(x, describe(x))
        tensor([0., 1., 2., 3., 4., 5.])
    """
    detached = tensor.detach()
    if tensor.is_contiguous():
        return detached.view(-1)
    if geometry.whole:
        return detached.as_strided((geometry.span,), (1,))
    size, stride = geometry.size, tensor.stride()
    dims = _moving_dims(size, stride)
    base = detached.as_strided([size[d] for d in dims], [stride[d] for d in dims])
    return base.contiguous().view(-1)


def restore(elements: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return a view of a flat range with the size and the stride of the geometry.

    Example:
        >>> x = torch.arange(3.0).expand(2, 3)
        >>> restore(flat(x, describe(x)), describe(x)).stride()
        (0, 1)
    """
    return elements.as_strided(geometry.size, geometry.stride, elements.storage_offset())


def spread(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with other strides, that leave holes and keep its elements apart.

    Memory: one copy, holes included, where its strides are not these.

    Example:
        >>> spread(torch.ones(2, 3), (8, 2)).stride()
        (8, 2)
    """
    size = tensor.shape
    if tensor.stride() == stride:
        return tensor
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    base = tensor[once]
    return base.new_empty_strided(base.shape, stride).copy_(base).as_strided(size, stride)


def can_spread(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor could have its strides again after it was one flat range.

    Not where it leaves holes and its elements share memory, but for what is expanded.
    """
    return describe(tensor).whole or _are_apart(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)
def _are_apart(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    reach = 0
    for dim in reversed(_moving_dims(size, stride)):
        if stride[dim] <= reach:
            return False
        reach += (size[dim] - 1) * stride[dim]
    return True
