"""How often memory may have been written without its version moving, as far as calls tell.

Two operations share one pack of what they save only while the data is the same. In-place operations
move the version of a tensor; writes through `.data`, through an address or an array, by collectives
and by other libraries do not. Each call that can lead to one counts for the memory it is given, and
a pack made before it is not found again. Memory that an array shares is never shared between packs,
for the array may be written at any later time. Counts are a thread's own: what another thread
writes, or C++ that no mode sees, is not known here. A cached look-up a call; no wait.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from vramx.compression.fakes import PLAIN, is_labelled
from vramx.compression.policy.calls import STRIDED

# Gives a tensor of the same memory with a version of its own.
_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
# Gives an address, which a kernel is started with at once.
_ADDRESSES = frozenset({"data_ptr", "const_data_ptr", "mutable_data_ptr"})
# Gives an object that others keep.
_ARRAYS = frozenset({"numpy", "__array__", "__dlpack__", "share_memory_"})
# Namespaces of torch.ops whose names or versions tell of writes; others' schemas may not.
_KNOWN_OPERATORS = frozenset({"aten", "prims", "vramx"})
_FOR_GOOD = -1
# Counts of memory that is gone wait until there are as many as of what lives, and so many more.
_MOST_DEAD = 64


class _Counts(threading.local):
    """How often each storage may have been written to, by the id of its object: see sharing.py."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.anywhere = 0
        self._swept_at = _MOST_DEAD

    def add(self, storage: torch.UntypedStorage, *, for_good: bool) -> None:
        found = self.of.get(id(storage))
        count = found[1] if found is not None and found[0]() is storage else 0
        count = _FOR_GOOD if for_good or count == _FOR_GOOD else count + 1
        self.of[id(storage)] = weakref.ref(storage), count
        if len(self.of) >= self._swept_at:
            self.of = {key: each for key, each in self.of.items() if each[0]() is not None}
            self._swept_at = 2 * len(self.of) + _MOST_DEAD


_counts = _Counts()


@lru_cache(maxsize=2048)
def may_write(func: Callable[..., Any]) -> bool:
    """Tell whether a call may lead to a write that the version of its arguments does not show.

    Example:
        >>> may_write(torch.Tensor.mul_), may_write(torch.Tensor.mul)
        (True, False)
    """
    name = str(getattr(func, "__name__", ""))
    if func == _DATA or name in _ADDRESSES or name in _ARRAYS:
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True  # its argument may be an alias that `.data` gave
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return str(func).split(".")[0] not in _KNOWN_OPERATORS
    module = str(getattr(func, "__module__", None) or "torch")
    return module.startswith("torch.distributed") or module.split(".")[0] != "torch"


def note_call(func: Callable[..., Any], values: Iterable[Any]) -> None:
    """Count a call that may write for the memory of each tensor among its arguments."""
    note(values, for_good=getattr(func, "__name__", "") in _ARRAYS)


def note(values: Iterable[Any], *, for_good: bool = False) -> None:
    """Count a possible write to the memory of tensors, and of those in lists."""
    for value in values:
        kind = type(value)
        if kind in PLAIN and value.layout is STRIDED:
            _note_memory(value, for_good=for_good)
        elif kind is list or kind is tuple:
            note(value, for_good=for_good)
        elif isinstance(value, torch.Tensor) and is_labelled(kind):
            with torch._C.DisableTorchFunction():
                if value.layout is STRIDED:
                    _note_memory(value, for_good=for_good)


def _note_memory(tensor: torch.Tensor, *, for_good: bool) -> None:
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # it stands for others, as those of a vmap do
        return
    _counts.add(storage, for_good=for_good)


def note_anywhere() -> None:
    """Count a possible write to any memory."""
    _counts.anywhere += 1


def epoch(storage: torch.UntypedStorage) -> Hashable:
    """Return what is equal for two moments only if no write in between is known to be possible."""
    found = _counts.of.get(id(storage))
    if found is None or found[0]() is not storage:
        return _counts.anywhere
    return object() if found[1] == _FOR_GOOD else found[1] + _counts.anywhere
