"""Tensors that are distributed over processes: what is here of one is packed in its place.

A DTensor has a part of a tensor in each process, or the whole in each. Parts are packed by every
process for itself, and make a DTensor of the same placements again: nothing is sent, and what all
processes have, all pack alike, for they draw the same noise. What is known of a part is its memory,
not the graph, which is that of the whole: so only operations are packed here of which the policy
asks no more. What is to be summed up first (partial) is kept: what is packed in place of elements
may depend on how large they are. Pure functions; a microsecond or two a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from vramx.compression.fakes import PLAIN
from vramx.compression.policy.calls import STRIDED, Operation
from vramx.compression.policy.columns import undoes_columns
from vramx.compression.policy.weights import derives_from_parameter
from vramx.compression.saved import Restored
from vramx.patch.of_classes import found_of

# A layer's data, and arguments or results of functions.
_PACKED = frozenset({"linear", "gelu", "silu", "relu"})


@found_of
def is_distributed(cls: Any) -> bool:
    """Tell whether a class of tensors is torch's DTensor.

    Example:
        >>> is_distributed(torch.Tensor)
        False
    """
    return bool(cls.__name__ == "DTensor" and cls.__module__.partition(".")[0] == "torch")


def part_of(tensor: Any) -> Any:
    """Return a DTensor's part in this process; of all else that itself.

    One that is still being received is waited for, as the operation that reads it does next.
    """
    if not is_distributed(type(tensor)):
        return tensor
    part = tensor._local_tensor
    return part if type(part) in PLAIN else getattr(part, "trigger_wait", lambda: part)()


def packs_part(tensor: Any, part: torch.Tensor, operation: Operation, min_bytes: int) -> bool:
    """Tell whether the policy can decide about a part as about a tensor."""
    if operation.custom or operation.name not in _PACKED or not tensor.requires_grad:
        return False
    if type(part) not in PLAIN or part.layout is not STRIDED:
        return False
    if any(placement.is_partial() for placement in tensor.placements):
        return False
    if _least_elements(tensor) * part.element_size() < min_bytes:
        return False  # all processes pack or none, or those behind would draw another one's noise
    return not derives_from_parameter(tensor) and not undoes_columns(operation)


def _least_elements(tensor: Any) -> int:
    """Return how many elements the smallest part has: the last of those that are cut even."""
    sizes = list(tensor.shape)
    for count, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_shard():
            size = sizes[placement.dim]
            sizes[placement.dim] = max(0, size - -(-size // count) * (count - 1))
    return math.prod(sizes)


def call_of_parts(operation: Operation) -> Operation:
    """Return an operation as what it is for the parts among its arguments."""
    return Operation(
        operation.name,
        tuple(_parts(operation.args)),
        dict(zip(operation.kwargs, _parts(operation.kwargs.values()), strict=True)),
        operation.library,
    )


def _parts(values: Iterable[Any]) -> Iterable[Any]:
    return [part_of(value) if isinstance(value, torch.Tensor) else value for value in values]


class Joined:
    """What is kept of a part, as the distributed tensor that it is of."""

    __slots__ = ("__weakref__", "_class", "_held", "_spec")

    def __init__(self, held: Restored, tensor: Any) -> None:
        self._held = held
        self._class = type(tensor)
        self._spec = tensor._spec

    def open(self) -> torch.Tensor:
        made: torch.Tensor = self._class(self._held.open(), self._spec, requires_grad=False)
        return made
