"""Arguments that are no tensors but change, such as a cache: as they were before the call.

A region that runs again must find its arguments as the first run did. A cache of keys and values
that is appended to has twice as many the second time; a list or a counter in an object has one more
item. So a recomputation is given a copy: new objects and containers around the same tensors. The
first run has the caller's own. Not responsible for containers that torch's pytree opens
(structure.py), nor for what a region reaches without its arguments.

Some tenths of a microsecond for each value in an object; any thread.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections import deque
from typing import Any

from torch import Tensor, nn

from vramx.errors import RecomputationError, warn_once

# What has no state that a call changes, or is one thing that copies would make two of.
_SHARED = (
    *(str, bytes, int, float, complex, type(None), type, enum.Enum, Tensor, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(functools.partial, range, slice),
)
# A cache has some hundred values. What has more, such as a reference to a whole program, is shared.
_LARGEST = 10_000


class _TooLargeError(Exception):
    """There are more values than an argument of a layer has."""


class Before:
    """An argument that is an object, as it was before the region ran."""

    def __init__(self, value: Any) -> None:
        copier = _Copier()
        self._copy = copier.copy(value)
        self._name = type(value).__name__
        self._is_cache = is_cache(value)
        self._tensors = [(tensor, tensor._version) for tensor in copier.tensors]

    def again(self) -> Any:
        """Return the argument for a recomputation, which may change it."""
        return _Copier().copy(self._copy)

    def check(self) -> None:
        """See what the region did to the argument.

        Raises:
            RecomputationError: it wrote into a tensor of it, and would do so again.
        """
        if any(tensor._version != version for tensor, version in self._tensors):
            hint = "; pass use_cache=False, or a cache that grows" if self._is_cache else ""
            raise RecomputationError(
                f"a checkpointed region writes into a tensor of its argument, a {self._name}, and "
                f"would do so again when it is recomputed{hint}"
            )
        self._tensors = []
        if self._is_cache:
            warn_once(
                f"a checkpointed layer fills a {self._name}, which keeps every layer's keys and "
                "values until the step ends; use_cache=False in the model's config or in the call "
                "makes none",
                stacklevel=6,
            )


def is_cache(value: Any) -> bool:
    """Tell whether a value is a cache of keys and values, by what it does and not by its name."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that an object refers to, each as often as it does.

    Example:
        >>> len(tensors_in(types.SimpleNamespace(keys=[Tensor(), Tensor()])))
        2
    """
    copier = _Copier()
    copier.copy(value)
    return copier.tensors


def as_before(leaf: Any) -> Any:
    """Return what stands for an argument in the meantime: itself, if nothing in it can change.

    Example:
        >>> as_before(3), type(as_before(types.SimpleNamespace(items=[]))).__name__
        (3, 'Before')
    """
    if isinstance(leaf, _SHARED) or not _has_state(leaf):
        return leaf
    try:
        return Before(leaf)
    except _TooLargeError:
        return leaf


def _has_state(value: Any) -> bool:
    if type(value).__module__.partition(".")[0] == "torch":
        return False  # generators, devices, process groups
    return isinstance(value, (dict, list, set, deque)) or bool(
        getattr(value, "__dict__", None) or _slots(type(value))
    )


def _slots(cls: type) -> list[str]:
    found: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


class _Copier:
    """Copies objects and containers, each once; `tensors` are those that it met."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._copies: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        if isinstance(value, _SHARED):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if len(self._copies) >= _LARGEST:
            raise _TooLargeError
        return self._copied(value)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, tuple) and type(value) is not tuple and hasattr(value, "_fields"):
            return type(value)(*map(self.copy, value))
        if type(value) is tuple:
            return tuple(map(self.copy, value))
        if not _has_state(value):
            return value
        shallow = _shallow(value)
        # Known before its parts are copied, which may refer to it.
        self._copies[id(value)] = shallow
        if shallow is not value:
            self._fill(shallow, value)
        return shallow

    def _fill(self, shallow: Any, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                dict.__setitem__(shallow, key, self.copy(dict.__getitem__(value, key)))
        elif isinstance(value, (list, deque)):
            for i, item in enumerate(list(value)):
                shallow[i] = self.copy(item)
        for name, part in list(getattr(shallow, "__dict__", {}).items()):
            shallow.__dict__[name] = self.copy(part)
        for name in _slots(type(value)):
            if hasattr(value, name):
                object.__setattr__(shallow, name, self.copy(getattr(value, name)))


def _shallow(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception:  # a lock, a file, a connection: there is only the one
        return value
