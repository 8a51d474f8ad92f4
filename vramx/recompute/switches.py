"""Switches that a region reads and nobody restores: globals of helpers, and attributes of classes.

A program may set one around a forward pass, and take it back before backward: a recomputation would
compute another function, and what it saves need not tell. To restore it would set it for every
thread. So a value that has changed by then is told of, once a name; one that the region changes
itself is a count, and is not. Values are numbers, texts and others without parts, and those in a
small dictionary.

Which names are read is found once for a class of modules: in its forward, in methods whose names
that has, and in functions of the program's that these name. What is called otherwise is not seen. A
call costs a look at the class of each module, and at each value.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from vramx.errors import brief, warn_once
from vramx.patch.references import globals_of, names_in, parts_of

_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_OTHERS = frozenset({"torch", "vramx", "numpy", "builtins"}) | sys.stdlib_module_names
_MOST_FUNCTIONS = 16  # of a class: a millisecond or two
_MOST_ENTRIES = 16


class _Switch(NamedTuple):
    """A name in a file, told by a function or a module of it, or in a class; weakly: a file's names
    hold what is in it."""

    place: weakref.ref[Any]
    name: str

    @property
    def key(self) -> tuple[int, str]:
        place = self.place()
        return id(getattr(place, "__globals__", place)), self.name

    def value(self) -> Any:
        value = _names_of(self.place()).get(self.name)
        if type(value) is dict and len(value) <= _MOST_ENTRIES:
            return {key: each for key, each in value.items() if isinstance(each, _VALUES)}
        return value if isinstance(value, _VALUES) else type(value)

    def __str__(self) -> str:
        place = self.place()
        known = "__module__" if isinstance(place, FunctionType) else "__name__"
        return f"{self.name} of {getattr(place, known, '')}"


# By class, and in it by key: the id of the names, or of the class that has them, and the name.
_known: weakref.WeakKeyDictionary[type, dict[tuple[int, str], _Switch]] = (
    weakref.WeakKeyDictionary()
)


class Switches:
    """The values that code of modules reads, but for globals of the functions in `restored`."""

    def __init__(self, modules: Iterable[nn.Module], restored: Iterable[FunctionType]) -> None:
        found: dict[tuple[int, str], _Switch] = {}
        for cls in {type(module) for module in modules}:
            if switches := _switches_of(cls):
                found.update(switches)
        if found:
            own = {(id(each.__globals__), name) for each in restored for name in globals_of(each)}
            found = {key: switch for key, switch in found.items() if key not in own}
        self._then = [(switch, switch.value()) for switch in found.values()]

    def settle(self) -> None:
        """Leave out what the first run has changed."""
        self._then = [each for each in self._then if each[0].value() == each[1]]

    def check(self) -> None:
        """Say once a name what is not as it was."""
        for switch, then in self._then:
            now = switch.value()
            if now != then:
                warn_once(
                    f"{switch} is {brief(now)} where a call under vramx.checkpoint is recomputed, "
                    f"and was {brief(then)} in the call, whose code reads it: if results depend on "
                    "it, the gradient is that of another function; leave it as it is until "
                    "backward is over, or keep it in an attribute of the module",
                    stacklevel=7,
                    about=str(switch),
                )


def _switches_of(cls: type) -> dict[tuple[int, str], _Switch]:
    found = _known.get(cls)
    if found is None:
        found = _known[cls] = {each.key: each for each in _find(cls)}
    return found


def _find(cls: type) -> Iterator[_Switch]:
    """Give the switches that methods of a class read, and functions that these name."""
    waiting: list[Any] = [vars(each)["forward"] for each in cls.__mro__ if "forward" in vars(each)]
    met: set[Any] = set()
    while waiting and len(met) < _MOST_FUNCTIONS:
        function = waiting.pop(0)
        if type(function) is not FunctionType or function in met or _is_others(function):
            continue
        met.add(function)
        waiting += parts_of(function)
        names = names_in(function.__code__)
        for place in (function, *_holders(cls), *_holders(*globals_of(function).values())):
            known = _names_of(place)
            for name in names:
                value = known.get(name, place)
                if type(value) is FunctionType:
                    waiting.append(value)
                elif type(value) is dict or isinstance(value, _VALUES):
                    yield _Switch(weakref.ref(place), name)


def _holders(*values: Any) -> Iterator[Any]:
    """Give the files among some values, and the classes that have the attributes of others."""
    for value in values:
        if isinstance(value, type) and not issubclass(value, enum.Enum):
            yield from (each for each in value.__mro__ if not _is_others(each))
        elif type(value) is ModuleType and not _is_others(value):
            yield value


def _names_of(place: Any) -> Mapping[str, Any]:
    if isinstance(place, FunctionType):
        return place.__globals__
    return {} if place is None else vars(place)


def _is_others(place: Any) -> bool:
    name = place.__name__ if type(place) is ModuleType else place.__module__
    return str(name).partition(".")[0] in _OTHERS
