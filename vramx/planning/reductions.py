"""The memory that torch's sums over rows take for a moment, which no result of theirs shows.

Where few outputs have many inputs, ATen's reduction kernel splits the inputs of an output among
blocks of threads, which meet in memory of the caching allocator. A sum over the rows of a matrix,
the gradient of a bias, takes up to 132 MiB for it on an H100, whatever the matrix holds. Pure
functions of shapes and strides; some microseconds.

Source: setReduceConfig and ReduceConfig::global_memory_size in ATen/native/cuda/Reduce.cuh, torch
2.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_THREADS, _WARP, _VECTOR = 512, 32, 4
_FEW_VALUES, _MANY_VALUES = 16, 256  # a thread's
_WIDE = torch.float64


class Processors(NamedTuple):
    """What of a GPU decides how far a reduction is split; an H100's where none is asked."""

    multiprocessors: int = 132
    threads: int = 2048


class _Axis(NamedTuple):
    size: int
    stride: int


def staging_bytes(func: Any, args: Any, kwargs: Any, gpu: Processors | None = None) -> int:
    """Return the bytes that an operation takes for a moment, beside its result.

    Args:
        func: an operation of ATen; 0 for those that are no sum, mean or norm.
        args, kwargs: its own, with tensors on a GPU or tensors without data that stand for them.
    """
    if func not in _REDUCTIONS or not isinstance(args[0], Tensor) or args[0].is_complex():
        return 0
    x, at = args[0], _REDUCTIONS[func]
    dims = args[at] if at is not None and len(args) > at else kwargs.get("dim")
    if x.numel() == 0 or x.device.type != "cuda":
        return 0
    chosen = range(x.dim()) if dims is None or dims == [] else dims
    reduced = {d % max(1, x.dim()) for d in ([chosen] if isinstance(chosen, int) else chosen)}
    return _split_bytes(x, reduced, gpu or Processors())


_REDUCTIONS = {
    torch.ops.aten.sum.default: None,
    torch.ops.aten.sum.dim_IntList: 1,
    torch.ops.aten.mean.default: None,
    torch.ops.aten.mean.dim: 1,
    torch.ops.aten.linalg_vector_norm.default: 2,
}


def _split_bytes(x: Tensor, reduced: set[int], gpu: Processors) -> int:
    """Return what the kernel asks the allocator for: partial results, and a counter a block."""
    inner = _merged(_Axis(x.shape[d], x.stride(d)) for d in reduced)
    outer = _merged(_Axis(x.shape[d], x.stride(d)) for d in set(range(x.dim())) - reduced)
    inputs, outputs = _count(inner), _count(outer)
    along_rows = not outer or (bool(inner) and inner[0].stride < outer[0].stride)
    vector = 1
    if along_rows:
        width, height = inputs, outputs
        if inner and inner[0].stride == 1 and width >= 128 and len(inner) == 1:
            width //= _VECTOR
    else:
        width, height = outputs, inputs
        if outer[0].stride == 1:
            vector = _output_vector(x, outer, inner)
            width //= vector
    block = _block(width, height, _THREADS // vector)
    step_input, step_output = (block[0], 1) if along_rows else (1, block[0])
    if _up(inputs, step_input) < min(block[1] * 16, _MANY_VALUES):
        return 0  # each warp has outputs of its own
    step_input *= block[1]
    values, grid = _up(inputs, step_input), _up(outputs // vector, step_output)
    target = gpu.multiprocessors * (gpu.threads // (block[0] * block[1]))
    if values < _MANY_VALUES or grid > target:
        return 0
    blocks = max(min(_up(target, grid), _up(values, _FEW_VALUES)), _up(values, _MANY_VALUES))
    if blocks == 1:
        return 0
    # Of integers and truth values sums are 64 bits wide.
    wide = x.dtype == _WIDE or not x.is_floating_point()
    partial = (8 if wide else 4) * outputs * blocks
    return partial * (1 if along_rows else block[0] * vector) + 4 * grid


def _merged(axes: Iterable[_Axis]) -> list[_Axis]:
    """Return the axes from the innermost on, those that are one in memory as one."""
    merged: list[_Axis] = []
    for axis in sorted((a for a in axes if a.size > 1), key=lambda a: a.stride):
        if merged and merged[-1].size * merged[-1].stride == axis.stride:
            merged[-1] = _Axis(merged[-1].size * axis.size, merged[-1].stride)
        else:
            merged.append(axis)
    return merged


def _count(axes: list[_Axis]) -> int:
    count = 1
    for axis in axes:
        count *= axis.size
    return count


def _output_vector(x: Tensor, outer: list[_Axis], inner: list[_Axis]) -> int:
    """Return how many neighbouring outputs a thread has: 4, 2 or 1, by what all can be cut into."""
    vector = _VECTOR
    strides = [axis.stride for axis in [*inner, *outer[1:]]]
    for n in [x.storage_offset(), outer[0].size, *strides]:
        while n % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Return the width and height of a block of threads."""
    width, height = (min(_power_below(n), threads) for n in (width, height))
    narrow = min(width, _WARP)
    height = min(height, threads // narrow)
    return min(width, threads // height), height


def _power_below(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def _up(n: int, by: int) -> int:
    return -(-n // by)
