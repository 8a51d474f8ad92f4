"""Where the elements of a tensor lie in its storage, and how to see them again.

A saved tensor is stored as one flat range. This file finds that range for any strided tensor, gives
it as a 1-D tensor, and lays the size and the stride of the tensor over a decoded range. It decides
nothing about what is stored. Pure functions, thread-safe; O(number of dimensions), and a copy of
the elements only where a tensor leaves holes in its range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a strided tensor lies over a flat range of elements.

    Equations: `start + span` elements of the storage cover the tensor; where `whole`, every element
    of the range belongs to it (so a range is all that has to be kept), and `stride` is its own.
    Where not, the range has holes: `flat` compacts it and `stride` is of the compacted elements.

    ```
    dense        [x x x x x x]     span = numel, any permutation of the dimensions
    expanded     [x x x]           span < numel, a stride is 0: the base is kept
    overlapping  [x x x x]         span < numel, as in unfold
    holes        [x . . x . .]     compacted to [x x]
    ```
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    span: int
    whole: bool


def describe(tensor: torch.Tensor) -> Geometry:
    """Return how a strided tensor with at least one element lies in its storage."""
    size, stride = tuple(tensor.shape), tensor.stride()
    start = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return Geometry(size, stride, start, tensor.numel(), True)
    span = 1
    # A dimension whose step is at most what the smaller ones cover leaves no hole.
    for step, count in sorted(zip(stride, size, strict=True)):
        if count == 1:
            continue
        if step > span:
            return _compacted(size, stride, start)
        span += (count - 1) * step
    return Geometry(size, stride, start, span, True)


def covered_elements(tensor: torch.Tensor) -> int:
    """Return how many elements a strided tensor has in memory: without what is only expanded."""
    count = 1
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if step else min(size, 1)
    return count


def covered_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of memory a strided tensor covers: of overlapping windows, once.

    Example:
        >>> covered_bytes(torch.zeros(4).expand(100, 4))
        16
    """
    elements = min(covered_elements(tensor), _reach(tensor))
    return elements * tensor.element_size()


def _reach(tensor: torch.Tensor) -> int:
    """Return how many elements lie between the first and the last of a tensor, both included."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps)


def _compacted(size: tuple[int, ...], stride: tuple[int, ...], start: int) -> Geometry:
    """Return the geometry after compaction: an expanded dimension stays one, the order too."""
    compact = [0 if step == 0 else 1 for step in stride]
    span = 1
    for dim in reversed(_moving_dims(size, stride)):
        compact[dim] = span
        span *= size[dim]
    return Geometry(size, tuple(compact), start, span, False)


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
    if geometry.whole:
        return detached.as_strided((geometry.span,), (1,), geometry.start)
    size, stride = geometry.size, tensor.stride()
    dims = _moving_dims(size, stride)
    base = detached.as_strided([size[d] for d in dims], [stride[d] for d in dims], geometry.start)
    return base.contiguous().view(-1)


def restore(elements: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return a view of a flat range with the size and the stride of the geometry.

    Example:
        >>> x = torch.arange(3.0).expand(2, 3)
        >>> restore(flat(x, describe(x)), describe(x)).stride()
        (0, 1)
    """
    return elements.as_strided(geometry.size, geometry.stride, elements.storage_offset())
