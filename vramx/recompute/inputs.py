"""The hooks that see a checkpoint's inputs: each is packed once, or kept as it is.

Whether they may be packed is known when the region has run: until then they are held, as the caller
of the region holds them. Not responsible for what the region itself saves: torch's checkpoint has
its own hooks for that. A pair of hooks belongs to one call, and so to one thread. A tensor costs
one kernel; nothing waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from vramx.compression import enclosing
from vramx.compression.codec import random
from vramx.compression.codec.codec import Packed, pack, unpack
from vramx.compression.codec.geometry import (
    Geometry,
    can_spread,
    covered_bytes,
    describe,
    flat,
    restore,
    spread,
)
from vramx.compression.codec.mapping import Mapping
from vramx.compression.codec.normalised import Normal
from vramx.compression.codec.roots import ROOT
from vramx.compression.config import KEEP, Compression
from vramx.compression.lifetime import outlive
from vramx.compression.offload import offload
from vramx.compression.policy.policy import LAYOUT, SavePolicy
from vramx.compression.saved import Reference
from vramx.compression.stats import CompressionStats
from vramx.errors import ModifiedInPlaceError
from vramx.recompute.norms import Norm, Places, has_short_rows, of_places, of_rows
from vramx.recompute.verdicts import Verdict


class _Saved(NamedTuple):
    """A tensor whose elements are packed, on the host, or both, and how they lay."""

    held: Packed | offload.Moved | offload.MovedExactly
    geometry: Geometry
    stride: tuple[int, ...]
    packed_bytes: int = 0  # and of statistics beside it; 0: it is not packed

    def open(self) -> Tensor:
        """Return it with its strides, holes included: by them operations choose how they run."""
        held = self.held
        if isinstance(held, offload.MovedExactly):
            found = held.get()
        else:
            found = unpack(held.get() if isinstance(held, offload.Moved) else held)
        return spread(restore(found, self.geometry), self.stride)


class _Argument(Reference):
    """An input as it is; a program may change it that saves nothing of it without a checkpoint."""

    __slots__ = ()

    def open(self) -> Tensor:
        try:
            return super().open()
        except ModifiedInPlaceError as error:
            raise ModifiedInPlaceError(
                f"{error}. It is an argument of a call under vramx.checkpoint, or of a block at "
                "'recompute_all', which runs again from it in backward: change a copy of it (x / 2 "
                "in place of x.div_(2)), or checkpoint what comes behind the first layer"
            ) from None


class _Slot:
    """What the graph holds for an input: exactly what it is, until it is known how to keep it."""

    __slots__ = ("__weakref__", "held", "nbytes")

    def __init__(self, tensor: Tensor) -> None:
        self.held: Reference | _Saved = _Argument(tensor)
        self.nbytes = covered_bytes(tensor)

    def open(self) -> Tensor:
        return self.held.open()

    def settle(
        self, number: int, verdict: Verdict, compression: Compression | None,
        share: str | float | None,
    ) -> None:  # fmt: skip
        compression = None if number in verdict.exact else compression
        if compression is None and share is None:
            return
        try:
            tensor = self.open()
        except (
            ModifiedInPlaceError
        ):  # by the region; torch refuses it in backward, and so does this
            return
        outlive(tensor)
        mapping: Mapping | None = None
        if compression is not None and _is_kept(tensor, number, verdict):
            compression = None
        elif compression is not None:
            mapping = _mapping(tensor, number, verdict, compression.format().group_size)
        if compression is None and share is None:
            return
        self.held = _save(tensor, compression, share, mapping) or self.held

    def count(self, stats: CompressionStats, reason: str) -> None:
        """Count it; the reason is why it is kept, where it is."""
        packed_bytes = self.held.packed_bytes if isinstance(self.held, _Saved) else 0
        reason = "" if packed_bytes else reason
        stats.record(_COUNTED, reason, self.nbytes, packed_bytes or self.nbytes)


# What an input is counted as, and why one is kept that is not of a rough region.
_COUNTED, _EXACT = "input of a region", "needed exactly"


def _is_kept(tensor: Tensor, number: int, verdict: Verdict) -> bool:
    """Tell whether rows share groups and have no scale of their own: of planes, they may."""
    alike = number in verdict.norms or number in verdict.planes
    return not alike and has_short_rows(tensor)


def _mapping(tensor: Tensor, number: int, verdict: Verdict, group_size: int) -> Mapping | None:
    """Return what is packed in place of an input's elements; None: these."""
    is_of_planes = number in verdict.planes
    norm: Norm | Places | None = verdict.norms.get(number)
    if norm is None and is_of_planes:
        norm = of_places(tensor)
    if norm is None:
        norm = of_rows(tensor, group_size, of_planes=is_of_planes)
    if norm is not None:
        return norm.mapping(tensor)
    return ROOT if number in verdict.rooted else None


Held = Reference | _Slot


class Inputs:
    """The inputs of one call, kept as a checkpoint says once it is known what ran on them.

    Args:
        compression: the format, and the options that decide what is packed; None keeps the values
            exact, and moves to the host what else would be packed.
        share: "cpu" or the fraction of the bytes that moves to the host; None: nothing does.
        stats: where to count.
    """

    def __init__(
        self,
        compression: Compression | None,
        share: str | float | None,
        stats: CompressionStats | None = None,
    ) -> None:
        self._compression = compression
        self._share = share
        self._stats = stats
        self._rules = _rules(compression)
        # One tensor may be several arguments.
        self._slots: dict[int, _Slot] = {}

    @property
    def may_pack(self) -> bool:
        """Whether the values of an input can differ from what they were."""
        return self._compression is not None and bool(self._slots)

    @property
    def allowed(self) -> frozenset[str]:
        """The operations that a policy gives bits to: their user says that they are smooth."""
        options = self._compression
        return frozenset() if options is None else _named(options) - _named(Compression())

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Note what torch's checkpoint saves while this context is entered."""
        with enclosing.Hooks(self.held, _open):
            yield

    def held(self, tensor: Tensor) -> Held:
        """Return what is kept of an input."""
        nothing = self._compression is None and self._share is None
        # What needs no gradient is an index, a mask or data that its owner holds anyway.
        if nothing or not tensor.requires_grad:
            return _Argument(tensor)
        choice = self._rules.choose(tensor, None)
        if not choice.bits or not can_spread(tensor):
            if self._stats is not None:
                nbytes = covered_bytes(tensor)
                self._stats.record(_COUNTED, choice.reason or LAYOUT, nbytes, nbytes)
            return _Argument(tensor)
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = _Slot(tensor)
        return slot

    @property
    def tensors(self) -> list[Tensor]:
        """What may be packed; a verdict has the numbers of these."""
        return [slot.open() for slot in self._slots.values()]

    def settle(self, verdict: Verdict) -> None:
        """Pack the inputs, or move them to the host with the values that they have."""
        compression = None if verdict.rough else self._compression
        if compression is not None or self._share is not None:
            for number, slot in enumerate(self._slots.values()):
                slot.settle(number, verdict, compression, self._share)
        if self._stats is not None:
            for slot in self._slots.values():
                slot.count(self._stats, verdict.rough or _EXACT)
        # The graph keeps the hooks; it must not keep through them what it has let go.
        self._slots = {}


@lru_cache(maxsize=16)
def _named(options: Compression) -> frozenset[str]:
    return frozenset(r.operation for r in options.rules if r.level != KEEP and not r.mask)


@lru_cache(maxsize=16)
def _rules(options: Compression | None) -> SavePolicy:
    return SavePolicy(options or Compression())


def _save(
    tensor: Tensor,
    compression: Compression | None,
    share: str | float | None,
    mapping: Mapping | None,
) -> _Saved | None:
    geometry, stride = describe(tensor), tensor.stride()
    elements = flat(tensor, geometry)
    if compression is None:
        assert share is not None
        moved = offload.put_exact(elements, share)
        return None if moved is None else _Saved(moved, geometry, stride)
    if compression.rounding == "stochastic":
        random.renew_on_replay(tensor.device)
    packed = pack(elements, compression.format(), None, mapping)
    nbytes = packed.nbytes + (mapping.nbytes if isinstance(mapping, Normal) else 0)
    return _Saved(packed if share is None else offload.put(packed, share), geometry, stride, nbytes)


def _open(held: Held) -> Tensor:
    return held.open()
