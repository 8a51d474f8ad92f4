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

import dis
import enum
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from vramx.errors import brief, warn_once

_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_OTHERS = frozenset({"torch", "vramx", "numpy", "builtins"}) | sys.stdlib_module_names
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
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

    @property
    def names(self) -> Mapping[str, Any]:
        place = self.place()
        if isinstance(place, FunctionType):
            return place.__globals__
        return {} if place is None else vars(place)

    def value(self) -> Any:
        value = self.names.get(self.name)
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

    def __init__(self, modules: Iterable[nn.Module], restored: Iterable[Any]) -> None:
        found: dict[tuple[int, str], _Switch] = {}
        for cls in {type(module) for module in modules}:
            if switches := _switches_of(cls):
                found.update(switches)
        if found:
            own = {(id(each.__globals__), name) for each in restored for name in _globals_of(each)}
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
        if type(function) is not FunctionType or function in met or _is_others(function.__module__):
            continue
        met.add(function)
        waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        for switch in _read(function, cls):
            value = switch.names[switch.name]
            if type(value) is FunctionType:
                waiting.append(value)
            elif type(value) is dict or isinstance(value, _VALUES):
                yield switch


def _read(function: FunctionType, cls: type) -> Iterator[_Switch]:
    """Give what a function reads by name: values, and functions that it may call."""
    known = function.__globals__
    for name, attribute in _names_in(function.__code__):
        holder: Any = cls
        if name:
            holder = known.get(name)
            if name in known:
                yield _Switch(weakref.ref(function), name)
        if type(holder) is ModuleType and not _is_others(holder.__name__):
            if attribute in vars(holder):
                yield _Switch(weakref.ref(holder), attribute)
        elif isinstance(holder, type) and not issubclass(holder, enum.Enum):
            owner = next((each for each in holder.__mro__ if attribute in vars(each)), None)
            if owner is not None and not _is_others(owner.__module__):
                yield _Switch(weakref.ref(owner), attribute)


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Return the globals that a code reads, each with the attribute that is read of it; attributes
    of other things are with an empty name."""
    found, before = [], ""
    for each in dis.get_instructions(code):
        if each.opname in _ATTRIBUTES:
            found.append((before, each.argval))
        elif each.opname == "LOAD_GLOBAL":
            found.append((each.argval, ""))
        before = each.argval if each.opname == "LOAD_GLOBAL" else ""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found += _names_in(inner)
    return tuple(dict.fromkeys(found))


def _globals_of(function: Any) -> Iterator[str]:
    return (name for name, _ in _names_in(function.__code__) if name)


def _is_others(name: Any) -> bool:
    return str(name).partition(".")[0] in _OTHERS


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises where the variable has no value yet
    except ValueError:
        return False
    return True
