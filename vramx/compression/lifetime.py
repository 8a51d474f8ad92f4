"""Memory that a packed copy lets go of stays until every stream that reads it has done so.

autograd keeps what an operation saves, so a program need not tell the allocator which streams read
it. Where a packed copy stands for the tensor, the tensor may die at once, and its memory is free in
the order of the stream that it was allocated on, while the current stream has yet to read it: the
operation's own kernels and the one that packs. Decides nothing. Any thread; half a microsecond a
tensor, and the allocator does nothing for a stream that is the memory's own. Nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def outlive(tensor: Tensor) -> int:
    """Keep the memory of a tensor until the current stream is done with what it was asked so far.

    Returns the stream's number, as current_stream() does.

    Example:
        >>> outlive(torch.zeros(4))  # on the host there is nothing to keep
        0
    """
    if not _has_streams(tensor):
        return 0
    device = tensor.get_device()
    tensor.record_stream(_current_stream(device))
    return int(_raw_stream(device)) if tensor.is_cuda else 0


def outlive_all(values: Iterable[Any]) -> None:
    """Do so for each tensor among arguments, and in lists of them; parameters live in any case."""
    streams: dict[int, Any] = {}
    for value in values:
        kind = type(value)
        if kind in _STAYS:
            continue
        if kind is list or kind is tuple:
            if value and type(value[0]) is not int:
                outlive_all(value)
            continue
        dies = kind is Tensor or (isinstance(value, Tensor) and not isinstance(value, Parameter))
        if dies and _has_streams(value):
            device = value.get_device()
            if device not in streams:
                streams[device] = _current_stream(device)
            value.record_stream(streams[device])


def current_stream(tensor: Tensor) -> int:
    """Return a number for the stream that work on a tensor's device goes to now; 0 on the host."""
    return int(_raw_stream(tensor.get_device())) if tensor.is_cuda else 0


# Of no memory, or of none that an operator's caller lets go of.
_STAYS = frozenset((type(None), bool, int, float, str, torch.dtype, Parameter))


def _has_streams(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _current_stream(device: int) -> Any:
    return _stream(*_stream_numbers(device))


# Making the object takes longer than recording it. The numbers name one stream for good.
@lru_cache(maxsize=256)
def _stream(stream: int, device: int, kind: int) -> Any:
    return torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)


# Looked up once: a build without CUDA has none, and no tensor to ask them for.
_stream_numbers: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
