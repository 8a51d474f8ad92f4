"""What is kept already, found by the live memory that it was made from.

Decides nothing. A Table belongs to one thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch


class _Entry(weakref.ref[Any]):
    """Weakly, what is kept under a key, and the storage that the key speaks of."""

    __slots__ = ("key", "storage")

    key: Hashable
    storage: weakref.ref[torch.UntypedStorage]


class Table:
    """Find what is kept already, by the live memory that it was made from.

    A key names a storage by the id of its Python object, which lives, and is the same one, as long
    as the storage does (torch keeps it alive): an entry whose weak reference gives another object,
    or none, speaks of memory that is gone. An entry goes with the last user of what it finds.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable, storage: torch.UntypedStorage) -> Any:
        entry = self._entries.get(key)
        if entry is None or entry.storage() is not storage:
            return None
        return entry()

    def add(self, key: Hashable, storage: torch.UntypedStorage, kept: Any) -> None:
        entry = _Entry(kept, self._drop)
        entry.key = key
        entry.storage = weakref.ref(storage)
        self._entries[key] = entry

    def _drop(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
