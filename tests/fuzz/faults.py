"""Decisions of vramx, each taken wrongly on purpose: the fuzz must fail with every one of them.

`names` are steps among which a program that shows the fault is soon found; the whole grammar finds
it too, and takes longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from vramx.compression import config, hooks, session
from vramx.compression.derivatives import Unpacking
from vramx.compression.policy import exactness, plans, policy, writes
from vramx.compression.policy.operations import OperationMode
from vramx.compression.policy.policy import Choice, SavePolicy
from vramx.compression.saved import Reference
from vramx.recompute import region, watch
from vramx.recompute.buffers import Buffers


class Fault(NamedTuple):
    """How a fault is planted, and the steps that show it."""

    plant: Callable[[], Any]
    names: tuple[str, ...]


def _set(place: Any, name: str, value: Any) -> Callable[[], Any]:
    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        plans.plans_of.cache_clear()  # made without the fault
        with patch.object(place, name, value):
            yield
        plans.plans_of.cache_clear()

    return plant


def _pack_integers(self: Any, tensor: torch.Tensor, original: Any = session.Session.pack) -> Any:
    if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.numel():
        return original(self, tensor)
    packed = session.plain_codec.pack(tensor.float().flatten(), config.Format())
    decoded = session.plain_codec.unpack(packed).to(tensor.dtype).view(tensor.shape)
    return Reference(decoded.clamp(min=0))


def _keep_everything(self: Any, tensor: torch.Tensor, operation: Any) -> Choice:
    return Choice(0, policy.POLICY)


def _never_idle(self: Any, module: Any, original: Any = hooks.CompressionContext.enter) -> None:
    original(self, None)


def _forget_versions(tensor: Any, geometry: Any, storage: Any, place: Any) -> Any:
    start = tensor.storage_offset()
    views = None if geometry.whole else (geometry.size, tensor.stride())
    return (place, id(storage), tensor.dtype, start, geometry.span, views)


@contextlib.contextmanager
def _write_buffers_again(self: Any) -> Iterator[None]:
    yield


FAULTS: dict[str, Fault] = {
    "packs the tensors of unknown Functions": Fault(
        _set(SavePolicy, "_third_party", lambda self, operation: Choice(8, "")),
        ("function_compares", "function_positions", "foreign_comb", "function_divides"),
    ),
    "packs what operations need exactly": Fault(
        _set(exactness, "needs_exact", lambda *_: False), ("log_small",)
    ),
    "packs integers": Fault(
        _set(session.Session, "pack", _pack_integers), ("sort", "argmax_gather", "pooled")
    ),
    "recomputes what is not smooth from packed inputs": Fault(
        _set(watch, "is_smooth", lambda *_: True), ("linear", "experts", "checkpoint")
    ),
    "recomputes Functions from packed inputs": Fault(
        _set(region.Watch, "look_at", lambda *_: None),
        ("linear", "function_compares", "checkpoint"),
    ),
    "moves statistics twice": Fault(
        _set(Buffers, "restored", _write_buffers_again), ("linear", "channel_norm", "checkpoint")
    ),
    "packs what gradients of gradients read": Fault(
        _set(Unpacking, "_note", lambda *_: None), ("linear", "gelu", "square")
    ),
    "packs the batch": Fault(_set(OperationMode, "is_given", lambda *_: False), ("gain", "linear")),
    "packs in eval()": Fault(
        _set(hooks.CompressionContext, "enter", _never_idle), ("linear", "gelu")
    ),
    "takes data of before a write": Fault(
        _set(session, "range_key", _forget_versions), ("rewritten",)
    ),
    "takes data of before a hidden write": Fault(
        _set(writes, "epoch", lambda _: 0), ("data_write", "alias_write", "array_write")
    ),
    "keeps everything": Fault(
        _set(SavePolicy, "choose_by_look", _keep_everything), ("linear", "gelu")
    ),
    "packs inputs of norms as other numbers": Fault(
        _set(plans, "MEAN_NORMS", frozenset()), ("uneven_norm",)
    ),
    "leaves changed modules": Fault(
        lambda: patch("vramx.restore", lambda *_: None), ("linear", "gelu")
    ),
}
# What the host has no way to show.
ONLY_WITH_CUDA: dict[str, Fault] = {
    "frees while a stream reads": Fault(
        lambda: patch.object(session, "outlive", lambda _: None), ("side_stream",)
    )
}
