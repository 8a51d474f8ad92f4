"""Decisions of vramx, each taken wrongly on purpose: the fuzz must fail with every one of them.

`program` shows the fault for certain: by a margin, and with no luck. What is saved in floating
numbers are often integers there, which bfloat16 holds exactly and a packed tensor does not: whoever
takes their integer part is off at every second element. `names` are steps among which a program
that shows the fault is soon found; the whole grammar finds it too, and takes longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tests.fuzz.directed import program, setting
from tests.fuzz.settings import Setting
from vramx.compression import config, hooks, session
from vramx.compression.derivatives import Unpacking
from vramx.compression.policy import exactness, plans, policy, writes
from vramx.compression.policy.operations import OperationMode
from vramx.compression.policy.policy import Choice, SavePolicy
from vramx.compression.saved import Reference
from vramx.recompute import region, watch
from vramx.recompute.buffers import Buffers


class Fault(NamedTuple):
    """How a fault is planted, the steps that show it, and a program that does."""

    plant: Callable[[], Any]
    names: tuple[str, ...]
    program: tuple[str, Setting]


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


_LINEAR = "nn.Linear(64, 64)"
_REGION = "h = pieces.api.checkpoint(self.b, h)"
# The order of a column's elements as floating numbers, through which gradients pass.
_INTEGERS = "h = h.argsort(1).to(h.dtype) + (h - h.detach())"


def _recomputed(module: str, *lines: str, region: tuple[str, ...] = ()) -> tuple[str, Setting]:
    source = program([_LINEAR, module], ["h = self.a(h)", *lines, _REGION], region)
    return source, setting(style="none")


def _written(line: str) -> tuple[str, Setting]:
    lines = ["fresh = h * 1.5", "h = self.a(fresh)", line, "h = h + self.b(fresh)"]
    return program([_LINEAR, _LINEAR], lines), setting(overwrites=True)


def _packed(*lines: str, module: str = _LINEAR, **fields: object) -> tuple[str, Setting]:
    return program([module], lines), setting(**fields)


FAULTS: dict[str, Fault] = {
    "packs the tensors of unknown Functions": Fault(
        _set(SavePolicy, "_third_party", lambda self, operation: Choice(8, "")),
        ("function_compares", "function_positions", "foreign_comb", "function_divides"),
        _packed("h = self.a(h)", "h = pieces.Positions.apply(h, h.argsort(1).to(h.dtype))"),
    ),
    "packs what operations need exactly": Fault(
        _set(exactness, "needs_exact", lambda *_: False), ("log_small",),
        _packed("h = (h * self.a).abs().log()", module="nn.Parameter(torch.ones(64))"),
    ),
    "packs integers": Fault(
        _set(session.Session, "pack", _pack_integers), ("sort", "argmax_gather", "pooled"),
        _packed("h = self.a(h)", "h = h.gather(-1, h.argsort(-1))"),
    ),
    "recomputes what is not smooth from packed inputs": Fault(
        _set(watch, "is_smooth", lambda *_: True), ("linear", "experts", "checkpoint"),
        _recomputed(
            "Region()", _INTEGERS, region=("h = h * (1 + h.detach().floor().remainder(2))",)
        ),
    ),
    "recomputes Functions from packed inputs": Fault(
        _set(region.Watch, "look_at", lambda *_: None),
        ("linear", "function_compares", "checkpoint"),
        _recomputed("Region()", _INTEGERS, region=("h = pieces.Compares.apply(h)",)),
    ),
    "moves statistics twice": Fault(
        _set(Buffers, "restored", _write_buffers_again), ("linear", "channel_norm", "checkpoint"),
        _recomputed("nn.BatchNorm1d(16)"),
    ),
    "packs what gradients of gradients read": Fault(
        _set(Unpacking, "_note", lambda *_: None), ("linear", "gelu", "square"),
        _packed("h = F.gelu(self.a(h)).square()", double=True, forces=True),
    ),
    "packs the batch": Fault(
        _set(OperationMode, "is_given", lambda *_: False), ("gain", "linear"),
        _packed(
            "h = h @ self.a**10", module="nn.Parameter(torch.logspace(2, -2, 64).diag() ** 0.1)",
            raw=True, learns_input=False,
        ),
    ),
    "packs in eval()": Fault(
        _set(hooks.CompressionContext, "enter", _never_idle), ("linear", "gelu"),
        _packed("h = F.gelu(self.a(h))", style="module", training=False, exact=True),
    ),
    "takes data of before a write": Fault(
        _set(session, "range_key", _forget_versions), ("rewritten",),
        _written("fresh[:, ::2] = x.tanh()[:, 1::2]"),
    ),
    "takes data of before a hidden write": Fault(
        _set(writes, "epoch", lambda _: 0), ("data_write", "alias_write", "array_write"),
        _written("fresh.data.mul_(0.5)"),
    ),
    "keeps everything": Fault(
        _set(SavePolicy, "choose_by_look", _keep_everything), ("linear", "gelu"),
        _packed("h = self.a(h)", *["h = F.gelu(h)"] * 8, smooth=True),
    ),
    "packs inputs of norms as other numbers": Fault(
        _set(plans, "MEAN_NORMS", frozenset()), ("uneven_norm",),
        _packed(
            "h = h * torch.logspace(-2, 2, 64).to(h)", "h = self.a(h.transpose(1, 2))",
            module="nn.BatchNorm1d(64)",
        ),
    ),
    "leaves changed modules": Fault(
        lambda: patch("vramx.restore", lambda *_: None), ("linear", "gelu"),
        _packed("h = F.gelu(self.a(h))", style="module"),
    ),
}  # fmt: skip
# What the host has no way to show.
ONLY_WITH_CUDA: dict[str, Fault] = {
    "frees while a stream reads": Fault(
        lambda: patch.object(session, "outlive", lambda _: None), ("side_stream",),
        _packed("h = pieces.on_side_stream(self.a, h)"),
    )
}  # fmt: skip
