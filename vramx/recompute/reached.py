"""Which modules a call can be seen to reach, and what a callable is made of.

Seen are names, closures, bound objects and arguments, and what these have; nothing is run. Of a
container whose items have no parts only their types are looked at: a file's vocabulary, or a list
of 100,000 numbers. Any thread; tens of microseconds for a call with some modules, 20 nanoseconds
an item, and a microsecond for each object in a container, of which there is a bound.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from vramx.errors import warn_once
from vramx.patch.of_classes import found_of
from vramx.patch.references import globals_of, parts_of

# Of all that lists hold, in one call: two or three milliseconds.
_MOST_PARTS = 1024


def modules_of(function: Any, leaves: Iterable[Any]) -> list[nn.Module]:
    """Return the modules that a call can be seen to reach, with all of their parts.

    Seen are the function itself, what it is bound to, closes over or names, and the arguments; of
    functions among these the same, but for methods of modules only modules that they name; and of
    other objects and containers, such as a trainer, what these have.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> modules_of(lambda x: norm(x), ()) == [norm]
        True
        >>> trainer = types.SimpleNamespace(norms=[norm])
        >>> modules_of(lambda x: trainer.norms[0](x), ()) == [norm]
        True
    """
    search = _Search()
    for value in (function, *leaves):
        search.add(value)
    parts = {id(part): part for root in search.roots.values() for part in root.modules()}
    return list(parts.values())


class _Search:
    """The modules that some values are, or have, by id."""

    def __init__(self) -> None:
        self.roots: dict[int, nn.Module] = {}
        self._met: set[FunctionType] = set()
        self._left = _MOST_PARTS

    def add(self, value: Any, depth: int = 4) -> None:
        parts: Iterable[Any] = ()
        if isinstance(value, nn.Module):
            self.roots[id(value)] = value
        elif isinstance(value, FunctionType):
            if value not in self._met:
                self._met.add(value)
                parts = *parts_of(value), *_named_by(value)
        elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            parts = value.__self__, *reached_from(value.__func__)
        elif isinstance(value, (list, tuple)):
            items = self._items(value) if depth else ()
            parts, depth = (*items, *_modules_in(value)), depth - 1  # a class's own attributes too
        elif depth and not isinstance(value, Tensor):
            parts, depth = reached_from(value) or _modules_in(value), depth - 1
        for part in parts:
            self.add(part, depth)

    def _items(self, container: list[Any] | tuple[Any, ...]) -> Iterable[Any]:
        """Return the items that may have modules: of other objects as many as are looked at."""
        items = _with_parts(container)
        others = [each for each in items if not isinstance(each, nn.Module)]
        self._left -= len(others)
        if self._left >= 0 or not others:
            return items
        warn_once(
            f"a function under vramx.checkpoint reaches a {type(container).__name__} of "
            f"{len(container)} objects: {_MOST_PARTS} of those in containers are looked at in a "
            "call, and modules of the others may be others when it is recomputed; have the "
            "function close over, and name, only what it needs",
            stacklevel=7,
            about="objects in containers that a checkpoint does not look at",
        )
        looked_at = {id(each) for each in others[: self._left]}
        return [each for each in items if isinstance(each, nn.Module) or id(each) in looked_at]


def _named_by(function: FunctionType) -> Iterator[Any]:
    """Give the globals of a function that may be, or have, modules, and functions of its file."""
    for each in globals_of(function).values():
        if isinstance(each, FunctionType):
            is_meant = each.__globals__ is function.__globals__
        elif isinstance(each, _CONTAINERS):
            inside = each.values() if isinstance(each, dict) else each
            is_meant = isinstance(next(iter(inside), None), (nn.Module, *_CONTAINERS))
        else:
            is_meant = not isinstance(each, _WITHOUT_MODULES)
        if is_meant:
            yield each


def reached_from(value: Any) -> tuple[Any, ...]:
    """Return what a callable is made of, and the modules that it names."""
    named = (each for each in globals_of(value).values() if isinstance(each, nn.Module))
    return *parts_of(value), *named


def _modules_in(value: Any) -> list[nn.Module]:
    """Return the modules that a dictionary or an object has, by themselves or in containers."""
    if isinstance(value, _WITHOUT_MODULES):
        return []
    held = (value if isinstance(value, dict) else {}, getattr(value, "__dict__", {}))
    found: list[nn.Module] = []
    for each in (part for named in held for part in _with_parts(named.values())):
        if isinstance(each, nn.Module):
            found.append(each)
        elif type(each) in (list, tuple, dict):
            inside = each.values() if isinstance(each, dict) else each
            if isinstance(next(iter(inside), None), nn.Module):
                found += [part for part in inside if isinstance(part, nn.Module)]
    return found


def _with_parts(items: Collection[Any]) -> list[Any]:
    """Return the items that are, or may have, modules.

    Example:
        >>> relu = nn.ReLU()
        >>> _with_parts([1, relu, "word", [2]]) == [relu, [2]]
        True
    """
    kinds = set(map(type, items))
    having = [kind for kind in kinds if _may_have_parts(kind)]
    if len(having) == len(kinds):
        return list(items)
    return [each for each in items if type(each) in having] if having else []


@found_of
def _may_have_parts(cls: Any) -> bool:
    if issubclass(cls, (Tensor, types.ModuleType, type)):
        return False
    return bool(cls.__dictoffset__) or issubclass(cls, (*_CONTAINERS, *_CALLABLES))


_CALLABLES = (FunctionType, MethodType, functools.partial)
_CONTAINERS = (list, tuple, dict)
# Python's own: where a function names one of them, it does not say which modules it reaches.
_WITHOUT_MODULES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
