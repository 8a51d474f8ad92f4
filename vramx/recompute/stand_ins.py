"""What stands in, while a region is recomputed, for tensors that it writes into.

Its modules have copies. A library that keeps the state of its layers in variables of its own writes
into the tensor itself, whatever the module has: so small ones hold for so long what they held then.
One thread at a time. A call costs a copy or three of each tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from vramx.recompute.tensors import storage_of

# Of a parameter without a gradient that is copied before a first run: statistics of a wide layer
# take some KiB, frozen weights that are larger most of a model.
_MOST_BYTES = 1 << 20


def is_small_constant(tensor: Tensor) -> bool:
    return not tensor.requires_grad and tensor.numel() * tensor.element_size() <= _MOST_BYTES


def may_share_memory(tensor: Any) -> bool:
    """Tell whether a tensor is a plain one, in one piece of memory: a sparse one has several.

    Example:
        >>> may_share_memory(torch.ones(2)), may_share_memory(torch.ones(2).to_sparse())
        (True, False)
    """
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def as_they_lay(sources: list[Tensor | None], now: list[Any]) -> list[Tensor | None]:
    """Return copies of tensors which share memory where others do: views of one another."""
    copies = [None if source is None else source.detach().clone() for source in sources]
    shared: dict[int, list[int]] = {}
    for i, tensor in enumerate(now):
        if may_share_memory(tensor) and copies[i] is not None:
            shared.setdefault(storage_of(tensor), []).append(i)
    for places in shared.values():
        if len(places) == 1 or any(_has_other_form(sources[i], now[i]) for i in places):
            continue
        with torch._C.DisableTorchFunction():
            memory = now[places[0]].untyped_storage().clone()
        for i in places:
            like = now[i]
            view = like.detach().new_empty(0).set_(
                memory, like.storage_offset(), like.shape, like.stride()
            )  # fmt: skip
            copies[i] = view.copy_(copies[i])
    return copies


def _has_other_form(source: Any, now: Tensor) -> bool:
    return bool(source.shape != now.shape or source.dtype != now.dtype)


def may_be_had_otherwise(now: Any, then: Tensor | None) -> bool:
    """Tell whether a region may write into a tensor that it has from others than its module.

    Large ones, such as a network that follows another, take too long to be written to and back.
    """
    if not may_share_memory(now) or then is None or now.is_inference():
        return False
    return is_small_constant(now) and not _has_other_form(then, now)


@contextlib.contextmanager
def as_before(pairs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Have tensors themselves hold what they held, meanwhile, and their versions with them."""
    if not pairs:
        yield
        return
    tensors = [tensor for tensor, _ in pairs]
    with contextlib.ExitStack() as versions:
        for tensor in tensors:  # torch 2.6 takes one
            versions.enter_context(_unsafe_preserve_version_counter(tensor))
        now = [tensor.detach().clone() for tensor in tensors]
        try:
            _write(tensors, [then for _, then in pairs])
            yield
        finally:
            _write(tensors, now)


@torch.no_grad()
def _write(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
