"""The hooks that see a checkpoint's inputs: each is packed once, or kept as it is.

Not responsible for what the region itself saves: torch's checkpoint has its own hooks for that. A
pair of hooks belongs to one call, and so to one thread. A tensor costs one kernel; nothing waits
for the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vramx.compression import offload, random
from vramx.compression.codec import Packed, pack, unpack
from vramx.compression.config import Compression
from vramx.compression.geometry import Geometry, describe, flat, restore
from vramx.compression.lifetime import outlive
from vramx.compression.policy import SavePolicy
from vramx.compression.saved import Reference


class _Saved(NamedTuple):
    """A tensor whose elements are packed, on the host, or both, and how they lay."""

    held: Packed | offload.Moved | offload.MovedExactly
    geometry: Geometry

    def open(self) -> Tensor:
        held = self.held
        if isinstance(held, offload.MovedExactly):
            return restore(held.get(), self.geometry)
        return restore(
            unpack(held.get() if isinstance(held, offload.Moved) else held), self.geometry
        )


@contextlib.contextmanager
def packed_inputs(compression: Compression | None, share: str | float | None) -> Iterator[None]:
    """Pack what torch's checkpoint saves while this context is entered.

    Args:
        compression: the format, and the options that decide what is packed; None keeps the values
            exact, and moves to the host what else would be packed.
        share: "cpu" or the fraction of the bytes that moves to the host; None: nothing does.
    """
    exact = compression is None and share is None
    rules = _rules(compression or Compression())
    seen: dict[int, tuple[weakref.ref[Tensor], Reference | _Saved]] = {}

    def save(tensor: Tensor) -> Reference | _Saved:
        # What needs no gradient is an index, a mask or data that its owner holds anyway.
        if exact or not tensor.requires_grad or not rules.choose(tensor, None).bits:
            return Reference(tensor)
        # One tensor may be several arguments. Its number is given to another only once it has died.
        known = seen.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        outlive(tensor)
        saved = _save(tensor, compression, share)
        seen[id(tensor)] = (weakref.ref(tensor), saved)
        return saved

    try:
        with saved_tensors_hooks(save, _open):
            yield
    finally:
        # The graph keeps the hooks; it must not keep through them what it has let go.
        seen.clear()


@lru_cache(maxsize=16)
def _rules(options: Compression) -> SavePolicy:
    return SavePolicy(options)


def _save(
    tensor: Tensor, compression: Compression | None, share: str | float | None
) -> Reference | _Saved:
    geometry = describe(tensor)
    elements = flat(tensor, geometry)
    if compression is None:
        assert share is not None
        moved = offload.put_exact(elements, share)
        return Reference(tensor) if moved is None else _Saved(moved, geometry)
    if compression.rounding == "stochastic":
        random.renew_on_replay(tensor.device)
    packed = pack(elements, compression.format())
    return _Saved(packed if share is None else offload.put(packed, share), geometry)


def _open(saved: Reference | _Saved) -> Tensor:
    return saved.open()
