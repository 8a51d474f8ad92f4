"""Generators of random numbers that torch's checkpoint does not set back: Python's and numpy's.

A region that draws from them, or from a torch.Generator of its own, would draw other numbers when
it is recomputed, and have the gradient of another function. Set back are the generators of the
process, where the files that the region's code is written in name them, also those that no module
stands for, as of a script under a profiler; and those that the function, its arguments and its
modules have. To ask and to set a state takes up to 30 microseconds, and nothing where there is
none.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from vramx.patch.of_classes import found_of
from vramx.patch.references import globals_of, is_filled, parts_of
from vramx.recompute.reached import reached_from

_Some = tuple[Any, ...]
_PYTHONS = random.random.__self__  # type: ignore[attr-defined]


class Generators:
    """The states of generators before a region runs, for those that recompute it.

    `functions` are the region's and those that it calls, such as hooks; `held` are values among
    which there may be some: a region's arguments and attributes.
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        modules: Iterable[nn.Module],
        held: Iterable[Any],
    ) -> None:
        found = {id(each): each for each in _found(functions, modules, held) if each is not None}
        self._states = [(each, state_of(each)) for each in found.values()]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have the generators the states of then meanwhile."""
        now = [(each, state_of(each)) for each, _ in self._states]
        for each, state in self._states:
            set_state(each, state)
        try:
            yield
        finally:
            for each, state in now:
                set_state(each, state)

    def have_drawn(self) -> bool:
        """Tell whether one has another state now."""
        return any(_bytes_of(state_of(each)) != _bytes_of(was) for each, was in self._states)


def _found(
    functions: Iterable[Callable[..., Any]], modules: Iterable[nn.Module], held: Iterable[Any]
) -> Iterator[Any]:
    yield from filter(is_generator, held)
    files, named, closures, strays = _of_classes(*map(type, modules))
    yield from named
    for method in closures:
        yield from map(_generator_of, parts_of(method()))
    for part in [part for each in functions for part in (each, *reached_from(each))]:
        if isinstance(part, FunctionType):
            yield from map(_generator_of, (*_named_by(part), *globals_of(part).values()))
            files |= {part.__module__}
            strays += (weakref.ref(part),) if _is_stray(part) else ()
        elif is_generator(part):
            yield part
    for file in files:
        known = vars(sys.modules[file]) if file in sys.modules else {}
        for name in _names(file, len(known)):
            yield _generator_of(known.get(name))
    for stray in strays:
        known = getattr(stray(), "__globals__", {})
        # A reference to what is gone has no hash.
        for name in _names_of_stray(stray, len(known)) if known else ():
            yield _generator_of(known.get(name))


@found_of
def _of_classes(*classes: type) -> tuple[frozenset[str], _Some, _Some, _Some]:
    """Return the files of classes, and the generators that their methods name by themselves.

    And, weakly, the methods that close over one, or over what may become one, and those whose
    globals are no module's.
    """
    every = {each for cls in classes for each in cls.__mro__ if not _is_torchs(each.__module__)}
    methods = [method for cls in every for method in vars(cls).values()]
    named = [_generator_of(each) for method in methods for each in _named_by(method)]
    closures = (weakref.ref(each) for each in methods if _may_close_over_one(each))
    strays = {id(each.__globals__): weakref.ref(each) for each in methods if _is_stray(each)}
    files = frozenset(cls.__module__ for cls in every)
    return files, tuple(named), tuple(closures), tuple(strays.values())


def _is_stray(function: Any) -> bool:
    """Whether the globals of a function are no module's that can be found by name.

    As of a script that cProfile runs, a file that is executed, or one that is loaded and not put
    among the modules. A decorator's wrapper has another file's name, and is not meant.
    """
    if not isinstance(function, FunctionType):
        return False
    names = function.__globals__
    if names.get("__name__", function.__module__) != function.__module__:
        return False
    module = sys.modules.get(function.__module__)
    return getattr(module, "__dict__", None) is not names


def _may_close_over_one(method: Any) -> bool:
    cells = (method.__closure__ or ()) if isinstance(method, FunctionType) else ()
    contents = [cell.cell_contents if is_filled(cell) else None for cell in cells]
    return any(each is None or _generator_of(each) is not None for each in contents)


def _named_by(function: Any) -> Iterator[Any]:
    """Give what a function closes over, and the modules that it may import while it runs."""
    if isinstance(function, FunctionType):
        yield from reached_from(function)
        names = function.__code__.co_names
        yield from (sys.modules.get(name) for name in ("random", "numpy") if name in names)


@lru_cache(maxsize=1024)
def _names(file: str, count: int) -> tuple[str, ...]:
    """Return the names in a file by which its code can reach a generator, now or later.

    Of so many: a notebook gets new ones as it goes on, and names of objects others.
    """
    if not count or file == "builtins" or _is_torchs(file):
        return ()
    return _names_in(vars(sys.modules[file]))


@lru_cache(maxsize=1024)
def _names_of_stray(stray: weakref.ref[Any], count: int) -> tuple[str, ...]:
    """Return those among a function's globals; of so many, as above."""
    if not count:
        return ()
    return _names_in(getattr(stray(), "__globals__", {}))


def _names_in(named: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        name
        for name, x in named.items()
        if not isinstance(x, _LASTING) or _generator_of(x) is not None
    )


# What a name stands for that has another meaning at no time.
_LASTING = (
    *(type, ModuleType, FunctionType, BuiltinMethodType, nn.Module),
    *(str, int, float, tuple, list, dict, set),
)


def _generator_of(value: Any) -> Any:
    """Return the generator that a name stands for; None where it stands for none."""
    if value is random:
        return _PYTHONS
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, ModuleType):
        numpys = numpy is not None and value in (numpy, numpy.random)
        return numpy.random.mtrand._rand if numpys else None
    # As of "from random import random".
    owner = value.__self__ if isinstance(value, (BuiltinMethodType, MethodType)) else value
    return owner if is_generator(owner) else None


def _is_torchs(file: str) -> bool:
    return file.partition(".")[0] in ("torch", "vramx")


def is_generator(value: Any) -> bool:
    """Tell whether a value is a generator of random numbers of torch, numpy or Python.

    Example:
        >>> is_generator(torch.Generator()), is_generator(random)
        (True, False)
    """
    return _kind(_class_of(value)) != ""


def _class_of(value: Any) -> Any:
    return type(value)  # which mypy takes for one that has no hash


@found_of
def _kind(cls: Any) -> str:
    if issubclass(cls, torch.Generator):
        return "torch"
    if issubclass(cls, random.Random):
        return "" if issubclass(cls, random.SystemRandom) else "python"
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return ""
    if issubclass(cls, numpy.random.RandomState):
        return "numpy"
    return "numpy generator" if issubclass(cls, numpy.random.Generator) else ""


def state_of(generator: Any) -> Any:
    """Return the state of a generator of any kind."""
    kind = _kind(_class_of(generator))
    if kind == "python":
        return generator.getstate()
    if kind == "numpy generator":
        return generator.bit_generator.state
    return generator.get_state()


def _bytes_of(state: Any) -> bytes:
    return pickle.dumps(state.numpy() if isinstance(state, torch.Tensor) else state)


def set_state(generator: Any, state: Any) -> None:
    """Have a generator a state that it had."""
    kind = _kind(_class_of(generator))
    if kind == "python":
        generator.setstate(state)
    elif kind == "numpy generator":
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
