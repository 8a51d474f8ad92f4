"""What is kept already, found by the live memory that it was made from, and how that is named.

Decides nothing. A Table belongs to one thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from vramx.compression.codec.geometry import Geometry
from vramx.compression.fakes import PLAIN, is_labelled
from vramx.compression.policy import writes
from vramx.compression.policy.calls import STRIDED, Operation

# Weakly, what is kept under a key, and the storage that the key speaks of.
_Entry = tuple[weakref.ref[Any], weakref.ref[torch.UntypedStorage]]
# Entries of what is gone wait until there are as many as of what is kept, and so many more.
_MOST_DEAD = 256


class Table:
    """Find what is kept already, by the live memory that it was made from.

    A key names a storage by the id of its Python object, which lives, and is the same one, as long
    as the storage does (torch keeps it alive): an entry whose weak reference gives another object,
    or none, speaks of memory that is gone. What an entry finds does not live by it.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._swept_at = _MOST_DEAD

    def __len__(self) -> int:
        self._sweep()
        return len(self._entries)

    def find(self, key: Hashable, storage: torch.UntypedStorage) -> Any:
        entry = self._entries.get(key)
        if entry is None or entry[1]() is not storage:
            return None
        return entry[0]()

    def add(self, key: Hashable, storage: torch.UntypedStorage, kept: Any) -> None:
        # A reference that calls back would take as long as all else here.
        self._entries[key] = weakref.ref(kept), weakref.ref(storage)
        if len(self._entries) >= self._swept_at:
            self._sweep()

    def offer(self, key: Hashable, storage: torch.UntypedStorage, kept: Any) -> None:
        """Add, unless something is found there already."""
        if self.find(key, storage) is None:
            self.add(key, storage, kept)

    def _sweep(self) -> None:
        """Forget the entries of what is gone."""
        alive = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
        self._entries = alive
        self._swept_at = 2 * len(alive) + _MOST_DEAD


def range_key(
    tensor: torch.Tensor, geometry: Geometry, storage: torch.UntypedStorage, place: Hashable
) -> tuple[Hashable, ...]:
    """Name the elements that a tensor has now; known and possible writes give it another name.

    The place comes first.
    """
    size, _, span, whole, *_ = geometry
    start = tensor.storage_offset()
    views = None if whole else (size, tensor.stride())
    version = (tensor._version, writes.epoch(storage))
    return (place, id(storage), tensor.dtype, start, span, version, views)


def cast_source(
    tensor: torch.Tensor, geometry: Geometry, operation: Operation
) -> torch.Tensor | None:
    """Return the argument of which a saved tensor is a cast that the operation itself made.

    Autocast casts one input once for each layer that reads it. The argument is alive and given to
    this very call, so that its storage, range and version name the data that was cast; the cast is
    the whole of a fresh storage, in the order of its source.
    """
    if operation.custom or tensor.grad_fn is None or not geometry.whole:
        return None
    match = operation.match(tensor)
    if match is None or not match.cast:
        return None
    if geometry.span * tensor.element_size() != tensor.untyped_storage().nbytes():
        return None
    source = match.tensor
    plain = type(source) in PLAIN or is_labelled(type(source))
    return (
        source if plain and source.layout is STRIDED and source.numel() == geometry.span else None
    )
