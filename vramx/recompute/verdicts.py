"""Which calls may be recomputed from packed inputs, as calls that were watched have shown.

A call is known by what runs, the parts of the function that can be told apart, and by what it is
given: shapes and types of tensors, other values as they are, the state of autocast. A call that
cannot be told from others is watched each time. One that took another way through the code than
those that were watched keeps its inputs exactly, and the next one is watched (way.py). Thread-safe:
a look-up costs some microseconds.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vramx.compression.codec.geometry import shape_of
from vramx.errors import warn_once
from vramx.recompute.norms import Norm
from vramx.recompute.reached import reached_from

# Two of them hold some megabytes of keys. What is dropped is watched again.
_MOST = 4096
# Of a container that a function closes over; a look at each takes half a microsecond.
_MOST_ITEMS = 1024
# What functions written in C are in.
_OF_FUNCTIONS = (types.ModuleType, type, type(None))
_VALUES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class Verdict(NamedTuple):
    """What a watched call showed: the operation that is not smooth, empty where all are; the norms
    that read its inputs, by the input's number; which inputs are packed as roots; which are kept
    as they are; whether operations were excused by where their arguments come from; and which
    inputs are planes, as images are."""

    rough: str
    norms: Mapping[int, Norm] = MappingProxyType({})
    rooted: frozenset[int] = frozenset()
    exact: frozenset[int] = frozenset()
    excused: bool = False
    planes: frozenset[int] = frozenset()


class Way(NamedTuple):
    """A number that tells ways apart, and the code on one: as long as it lives, no other code is
    where it is in memory."""

    number: int
    codes: tuple[types.CodeType, ...]

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and self.number == other.number


# Ways of a call, and calls that are watched for one that was not, before it is kept exactly.
_MOST_WAYS, _MOST_TRIES = 16, 4
_UNSEEN = Verdict("a way through its code that no watched call took")


class _Seen:
    """What the calls of one key have shown, by the ways that they took through the code."""

    def __init__(self) -> None:
        self.rough: Verdict | None = None  # of all ways: nothing is packed
        self.by_way: dict[Way, Verdict] = {}
        self.waiting: Way | None = None  # that was taken by a call that was not watched
        self.tries = 0

    def note(self, way: Way, verdict: Verdict) -> None:
        """Keep what a watched call showed."""
        if way in self.by_way or len(self.by_way) < _MOST_WAYS:  # some calls are watched each time
            self.by_way[way] = verdict
        self.tries += 1
        if self.waiting is not None and self.tries == _MOST_TRIES:
            # A call does not take it while it is watched, or seldom.
            self.by_way.setdefault(self.waiting, _UNSEEN)
        if self.waiting in self.by_way:
            self.waiting = None

    def find(self, way: Way) -> Verdict:
        """Return what is known of the way of a call that was not watched."""
        found = self.by_way.get(way)
        if found is None and len(self.by_way) < _MOST_WAYS:
            self.waiting, self.tries = way, 0
        return _UNSEEN if found is None else found


_seen: OrderedDict[Hashable, _Seen] = OrderedDict()


class _UnknownError(Exception):
    """Something has no lasting identity."""


def key_of(function: Any, leaves: Sequence[Any], allowed: frozenset[str]) -> Hashable | None:
    """Return what a call is known by; None: it cannot be told from others."""
    try:
        return (_identity(function), allowed, tuple(map(_described, leaves)), *_modes(leaves))
    except (_UnknownError, TypeError):
        return None


def known(key: Hashable | None) -> Verdict | None:
    """Return what calls of that key showed so far; None: the next one is to be watched."""
    seen = None if key is None else _seen.get(key)
    if seen is None or seen.rough is not None:
        return None if seen is None else seen.rough
    return None if seen.waiting is not None else next(iter(seen.by_way.values()), None)


def of_way(key: Hashable, function: Any, way: Way, shown: Verdict | None) -> Verdict:
    """Return how a call's inputs are kept by the way that it took: as a call that took it showed.

    What runs may have become another since, as by a cell of a notebook, a part that was replaced,
    or an attribute. Then inputs are kept exactly, and the next call is watched.

    Args:
        shown: what the call itself showed; None: it was not watched.
    """
    if shown is not None:
        _noted(key).note(way, shown)
        return shown
    seen = _noted(key)
    found = seen.find(way)
    if found is _UNSEEN and len(seen.by_way) >= _MOST_WAYS:
        warn_once(
            f"vramx.checkpoint keeps the inputs of {name_of(function)} exactly, as level='keep' "
            f"does, in calls that take another way through its code than the first {_MOST_WAYS}",
            stacklevel=6,
        )
    return found


def _noted(key: Hashable) -> _Seen:
    seen = _seen.get(key)
    if seen is None:
        if len(_seen) >= _MOST:
            _seen.popitem(last=False)
        seen = _seen.setdefault(key, _Seen())
    return seen


def remember(key: Hashable | None, function: Any, verdict: Verdict) -> None:
    """Keep that calls of a key are not smooth, and name why once a function."""
    if key is not None:
        _noted(key).rough = verdict
    warn_once(
        f"vramx.checkpoint keeps the inputs of {name_of(function)} exactly, as level='keep' "
        f"does: {verdict.rough} is not known to be smooth, so that a recomputation from packed "
        "inputs may choose otherwise; a policy that names a level for it, as in "
        "Compression(policy={...}), says that it is",
        stacklevel=7,
    )


def name_of(function: Any) -> str:
    """Return how a region is named to its user.

    Example:
        >>> name_of(functools.partial(nn.Linear.forward, nn.Linear(2, 2)))
        'Linear'
    """
    if isinstance(function, functools.partial):
        owner = function.args[0] if function.args else None
        return name_of(owner if isinstance(owner, nn.Module) else function.func)
    if isinstance(function, types.MethodType) and isinstance(function.__self__, nn.Module):
        return type(function.__self__).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def _identity(value: Any, around: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, nn.Module):
        return weakref.ref(value), value.training
    if isinstance(value, _VALUES):
        return type(value), value  # True == 1, and is another argument
    if isinstance(value, (list, tuple)) and len(value) > _MOST_ITEMS:
        raise _UnknownError
    if isinstance(value, (types.MethodType, functools.partial, list, tuple)):
        return type(value), *(_identity(part, around) for part in reached_from(value))
    if isinstance(value, types.FunctionType):
        return _identity_of_function(value, around)
    if isinstance(value, type):
        return weakref.ref(value)
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, _OF_FUNCTIONS):
        return value  # and no method of an object, such as a tensor's
    own = getattr(value, "recomputed_function", None)
    if own is None:
        raise _UnknownError
    return type(value), _identity(own)


def _identity_of_function(function: types.FunctionType, around: tuple[Any, ...]) -> Any:
    if any(function is outer for outer in around):  # it calls itself
        return function.__code__
    inside = (*around, function)
    try:
        # A lambda is a new function in each step, of the same code.
        return function.__code__, *(_identity(part, inside) for part in reached_from(function))
    except _UnknownError:
        return weakref.ref(function)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return type(leaf), shape_of(leaf), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, nn.Module):
        return _identity(leaf)
    return _identity(leaf if isinstance(leaf, _VALUES) else type(leaf))


def _modes(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    )
