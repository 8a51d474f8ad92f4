"""Numbers, words and containers in files and classes, where a region's functions reach them.

A forward that reads a temperature from its file, a helper that counts its calls there, or a class
that counts those of all its modules, finds in backward what has become of it. So what is named by
the methods of modules, by the function, and by functions that these name, and what the classes of
modules have, is put back in place for a recomputation, and then made what it was just before.
Torch's files and classes are not looked into, and which names there are is looked for once. A call
costs a look at each.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from vramx.recompute.functions import read_by
from vramx.recompute.objects import FIXED, Copier, differs
from vramx.recompute.wholes import CONTAINERS, as_now, is_whole

# Functions that name functions.
_MOST_FUNCTIONS = 64
_WITHIN = ("fget", "__func__", "func")
_ABSENT = object()
_Place = str | type  # a file or a class
_Names = tuple[tuple[_Place, str], ...]


class _Named(NamedTuple):
    place: _Place
    name: str
    value: Any
    then: Any  # the value, or a copy of it

    def is_other(self) -> bool:
        now = _get(self.place, self.name)
        return now is not self.value or (self.then is not now and differs(self.then, now))


class Globals:
    """What the globals that a region's functions name, and what classes have, are now."""

    def __init__(self, functions: Iterable[FunctionType], modules: Iterable[nn.Module]) -> None:
        names = dict.fromkeys(_names_of_classes(tuple(map(type, modules))))
        names |= dict.fromkeys(name for part in functions for name in _names_from(part))
        self._then = [
            _Named(place, name, value, as_now(value))
            for place, name in names
            for value in (_get(place, name),)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have them as they were then meanwhile."""
        now = [(each, _get(each.place, each.name)) for each in self._then]
        copier = Copier()
        for each in self._then:
            if each.is_other():
                _put(each.place, each.name, copier.copy(each.then))
        try:
            yield
        finally:
            for each, value in now:
                _put(each.place, each.name, value)


def _get(place: _Place, name: str) -> Any:
    return vars(sys.modules[place] if isinstance(place, str) else place).get(name, _ABSENT)


def _put(place: _Place, name: str, value: Any) -> None:
    if _get(place, name) is value:
        return
    owner: Any = sys.modules[place] if isinstance(place, str) else place
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@functools.lru_cache(maxsize=1024)
def _names_of_classes(classes: tuple[type, ...]) -> _Names:
    """Return what classes have, and what their methods name, but for torch's."""
    every = {cls for each in classes for cls in each.__mro__ if not _is_torchs(cls.__module__)}
    values = [(cls, name, value) for cls in every for name, value in vars(cls).items()]
    own = [(cls, name) for cls, name, x in values if _may_change(x) and not name.startswith("__")]
    return *own, *(each for _, _, value in values for each in _names_from(value))


def _names_from(function: Any) -> _Names:
    for inside in _WITHIN:  # of a property, a static or a class method, a cached property
        function = getattr(function, inside, None) or function
    if type(function) is FunctionType and _is_in_its_file(function):
        return _names_of(function.__code__, function.__module__)
    return ()


def _is_in_its_file(function: FunctionType) -> bool:
    """Tell whether a function's globals are those of a file, not torch's, and none of exec()."""
    file = sys.modules.get(function.__module__ or "")
    if file is None or function.__globals__ is not vars(file):
        return False
    return not _is_torchs(function.__module__)


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType, file: str) -> _Names:
    """Return what a code in a file names that changes, and what functions do that it names."""
    found: dict[tuple[_Place, str], None] = {}
    waiting, seen = [(code, file)], set[CodeType]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        code, file = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        known = vars(sys.modules[file])
        for name in read_by(code):
            value = known.get(name, _ABSENT)
            if type(value) is FunctionType and _is_in_its_file(value):
                waiting.append((value.__code__, value.__module__))
            elif _may_change(value):
                found[file, name] = None
    return tuple(found)


def _may_change(value: Any) -> bool:
    return isinstance(value, (*FIXED, *CONTAINERS)) or is_whole(type(value))


def _is_torchs(file: str) -> bool:
    return file.partition(".")[0] in ("torch", "builtins", "vramx")
