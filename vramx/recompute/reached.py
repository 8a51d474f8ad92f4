"""Which modules a call can be seen to reach, and what a callable is made of.

Seen are names, closures, bound objects and arguments, and what these have; nothing is run. Any
thread; tens of microseconds for a call with some modules.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from vramx.patch.references import globals_of, parts_of


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
    roots: dict[int, nn.Module] = {}
    met: set[FunctionType] = set()
    for value in (function, *leaves):
        _add_roots(roots, met, value)
    parts = {id(part): part for root in roots.values() for part in root.modules()}
    return list(parts.values())


def _add_roots(
    roots: dict[int, nn.Module], met: set[FunctionType], value: Any, depth: int = 4
) -> None:
    parts: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        roots[id(value)] = value
    elif isinstance(value, FunctionType):
        if value not in met:
            met.add(value)
            parts = *parts_of(value), *_named_by(value)
    elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        parts = value.__self__, *reached_from(value.__func__)
    elif depth and not isinstance(value, Tensor):
        parts, depth = reached_from(value) or _modules_in(value), depth - 1
    for part in parts:
        _add_roots(roots, met, part, depth)


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
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    found: list[nn.Module] = []
    for each in (held or {}).values():
        if isinstance(each, nn.Module):
            found.append(each)
        elif type(each) in (list, tuple, dict):
            inside = each.values() if isinstance(each, dict) else each
            if isinstance(next(iter(inside), None), nn.Module):
                found += [part for part in inside if isinstance(part, nn.Module)]
    return found


_CONTAINERS = (list, tuple, dict)
# Python's own: where a function names one of them, it does not say which modules it reaches.
_WITHOUT_MODULES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
