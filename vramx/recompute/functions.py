"""A function as it is now: with the variables that it closes over and the globals that it reads.

A loop that checkpoints `lambda x: layer(x)` gives each call its own layer, and backward, which runs
when the loop is over, the last one's. So a recomputation calls a function of the same code whose
variables are those of the call, and so are its defaults and what a partial gives to it; where all
are what they were, it is the function itself. Python's own containers, iterators and arrays among
them are copied, and objects with slots, but not those of globals; other objects are shared
(attributes.py has what they hold). What a recomputation writes to the variables is forgotten, also
where they are by then what they were before the call. Forward hooks are functions that the region
calls too. A call costs a microsecond and a look at each variable.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from vramx.errors import warn_once
from vramx.recompute.copies import (
    Copier,
    Forgetting,
    TooLargeError,
    another_of,
    differs,
    has_slots_alone,
    has_state,
)
from vramx.recompute.shared import Pair, is_pair
from vramx.recompute.tensors import version_of, without_graph
from vramx.recompute.told import tell_of_change
from vramx.recompute.wholes import (
    CONTAINERS,
    as_now,
    is_whole,
    tell_of_advance,
    tensors_held,
)

# Decorators over decorators; what lies deeper is shared.
_MOST_FUNCTIONS = 16


class _Variable(NamedTuple):
    place: Any  # a cell, or the name of a global
    value: Any
    then: Any  # the value, or a copy of a container
    key: int = 0  # the id of a container of which there is a copy

    def is_other(self, now: Any) -> bool:
        return now is not self.value or (self.then is not now and differs(self.then, now))

    def again(self, copier: Copier) -> Any:
        """Return the value of then; what was not copied then is shared."""
        return self.value if self.then is self.value else copier.copy_of(self.then)

    def forgetting(self, now: Any, forgetting: Forgetting) -> _Variable:
        """Return one that holds no graph, where a run put something else in its place."""
        if not self.is_other(now):
            return self
        if isinstance(self.value, Tensor):
            bare = without_graph(self.value)
            return _Variable(self.place, bare, bare)
        if self.then is self.value:
            return self
        return self._replace(value=_GONE, then=forgetting.copy_of(self.then))


_GONE = object()  # what a variable was, of which there is a copy

# By the id of a container its copy, for all that have it to have one.
_Thens = dict[int, Any]


class _Given:
    """The defaults of a function, or what a partial gives to one, at one time."""

    def __init__(self, args: Any, kwargs: Any, thens: _Thens) -> None:
        self._args = [_variable(None, each, thens, _of_slots) for each in args or ()]
        named = (kwargs or {}).items()
        self._kwargs = {name: _variable(None, each, thens, _of_slots) for name, each in named}
        self.every = (*self._args, *self._kwargs.values())

    def is_other(self) -> bool:
        return any(each.is_other(each.value) for each in self.every)

    def forget(self, forgetting: Forgetting) -> None:
        self._args = [each.forgetting(each.value, forgetting) for each in self._args]
        for name, each in self._kwargs.items():
            self._kwargs[name] = each.forgetting(each.value, forgetting)
        self.every = (*self._args, *self._kwargs.values())

    def again(self, copier: Copier) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the values of then."""
        named = {name: each.again(copier) for name, each in self._kwargs.items()}
        return tuple([each.again(copier) for each in self._args]), named


class _Taken:
    """A function and its variables at one time."""

    def __init__(self, function: FunctionType, thens: _Thens) -> None:
        self.function = function
        self.given = _Given(function.__defaults__, function.__kwdefaults__, thens)
        names = function.__code__.co_freevars
        cells = zip(names, function.__closure__ or (), strict=True)
        self.cells = [
            _variable(cell, cell.cell_contents, thens, _of_slots)
            for name, cell in cells
            if _is_set(name, cell)
        ]
        known = function.__globals__
        self.globals = [
            _variable(name, known[name], thens)
            for name in _read_by(function.__code__)
            if name in known and type(known[name]) is not ModuleType
        ]

    def is_other(self) -> bool:
        known = self.function.__globals__
        cells = any(each.is_other(each.place.cell_contents) for each in self.cells)
        named = any(each.is_other(known.get(each.place)) for each in self.globals)
        return cells or named or self.given.is_other()

    def forget(self, forgetting: Forgetting) -> None:
        known = self.function.__globals__
        now = [each.place.cell_contents for each in self.cells]
        cells = zip(self.cells, now, strict=True)
        self.cells = [each.forgetting(value, forgetting) for each, value in cells]
        named = ((each, known.get(each.place)) for each in self.globals)
        self.globals = [each.forgetting(value, forgetting) for each, value in named]
        self.given.forget(forgetting)


class Variables:
    """The variables of a function, and of those that it is made of or closes over, as they are now.

    So are those of `hooks`, which it calls as well, and of `others`, which are its own too.

    Example:
        >>> doubled, tripled = [Variables(lambda x: x * factor) for factor in (2, 3)]
        >>> doubled.function()(1), tripled.function()(1)
        (2, 3)
    """

    def __init__(
        self, function: Callable[..., Any], hooks: Iterable[Any] = (), others: Iterable[Any] = ()
    ) -> None:
        self._function = function
        parts = [part for each in (function, *others) for part in _functions(each)]
        self._bound = [each.__self__ for each in parts if type(each) is MethodType]
        self._own = {id(each) for each in parts}
        known = {id(each): each for each in parts}
        for hook in hooks:
            known.update((id(each), each) for each in _functions(hook))
        thens: _Thens = {}
        self._taken = {
            key: _Taken(each, thens) for key, each in known.items() if type(each) is FunctionType
        }
        self._given = {
            key: _Given(each.args, each.keywords, thens)
            for key, each in known.items()
            if type(each) is functools.partial
        }
        self._versions = self._versions_now()
        self._held = [
            (tensor, version_of(tensor)) for _, then in self.pairs for tensor in tensors_held(then)
        ]
        self._changes = False  # in a run

    def _versions_now(self) -> list[tuple[Tensor, int]]:
        return [
            (each.value, version_of(each.value))
            for taken in self._taken.values()
            for each in (*taken.cells, *taken.globals)
            if isinstance(each.value, Tensor)
        ]

    @property
    def functions(self) -> list[FunctionType]:
        """The functions whose globals are those of then in a recomputation."""
        return [each.function for each in self._taken.values()]

    @property
    def objects(self) -> list[Any]:
        """What the functions are bound to, close over and were given, and what is called.

        Of hooks these are shared: they may be those of a library that moves weights about.
        """
        taken = [each for key, each in self._taken.items() if key in self._own]
        given = [each for key, each in self._given.items() if key in self._own]
        cells = [each.value for one in taken for each in one.cells]
        givens = (*(one.given for one in taken), *given)
        by_hand = [each.value for one in givens for each in one.every]
        return [self._function, *self._bound, *cells, *by_hand]

    def settle(self) -> None:
        """See what a run of the function did: say once where it wrote into a tensor."""
        held, self._held = self._held, []
        if any(version_of(tensor) != version for tensor, version in (*self._versions, *held)):
            _say_written(getattr(self._function, "__qualname__", type(self._function).__name__))
        self._changes = self._is_other()
        if self._changes:
            self._forget_graphs()
        self._versions = self._versions_now()

    def _forget_graphs(self) -> None:
        """Hold no graph of what the run put something else in the place of.

        It may hold an earlier call, and that one what was there before it.
        """
        forgetting = Forgetting()
        for taken in self._taken.values():
            taken.forget(forgetting)
        for given in self._given.values():
            given.forget(forgetting)

    def _is_other(self) -> bool:
        others = any(each.is_other() for each in self._taken.values())
        return others or any(each.is_other() for each in self._given.values())

    def function(self) -> Callable[..., Any]:
        """Return the function with the variables of then."""
        again: Callable[..., Any] = self.again()(self._function)
        return again

    @property
    def pairs(self) -> Iterator[Pair]:
        """The containers in variables with their copies from before."""
        givens = (*self._given.values(), *(each.given for each in self._taken.values()))
        variables = (
            *(each for taken in self._taken.values() for each in (*taken.cells, *taken.globals)),
            *(each for given in givens for each in given.every),
        )
        return ((each.key, each.then) for each in variables if each.key)

    def again(self, copier: Copier | None = None) -> Callable[[Any], Any]:
        """Return what gives the function, and hooks, with the variables of then."""
        written = [each for each, version in self._versions if version_of(each) != version]
        if written:
            tell_of_change(written)
        self._versions = []
        if not self._changes and not self._is_other():
            return _as_it_is
        copier, cells = Copier() if copier is None else copier, dict[int, CellType]()
        named = self._globals(copier)
        for each in self._taken.values():
            cells.update((id(variable.place), CellType()) for variable in each.cells)
        made = {key: _made(each, cells, named, copier) for key, each in self._taken.items()}
        given = {key: each.again(copier) for key, each in self._given.items()}
        again = functools.partial(_around, made=made, given=given)
        for each in self._taken.values():
            for variable in each.cells:
                value = variable.again(copier)
                cells[id(variable.place)].cell_contents = again(value)
        return again

    def _globals(self, copier: Copier) -> dict[int, dict[str, Any]]:
        """Return the globals of then, where they differ, by the ids of those of now."""
        others: dict[int, dict[str, Any]] = {}
        for taken in self._taken.values():
            known = taken.function.__globals__
            for each in taken.globals:
                if each.then is not each.value or each.is_other(known.get(each.place)):
                    named = others.setdefault(id(known), dict(known))
                    named[each.place] = each.again(copier)
        return others


def _as_it_is(function: Any) -> Any:
    return function


def _say_written(name: str) -> None:
    warn_once(
        f"{name} under vramx.checkpoint writes into a tensor that it closes over, and does so once "
        "more when it is recomputed, with what it finds then; make it a buffer of a module",
        stacklevel=7,
    )


def _made(
    taken: _Taken, cells: dict[int, CellType], others: dict[int, dict[str, Any]], copier: Copier
) -> FunctionType:
    function = taken.function
    closure = tuple(cells.get(id(cell), cell) for cell in function.__closure__ or ())
    code, named = function.__code__, others.get(id(function.__globals__), function.__globals__)
    defaults, by_name = taken.given.again(copier)
    made = FunctionType(code, named, function.__name__, defaults, closure)
    made.__kwdefaults__ = by_name
    made.__dict__.update(function.__dict__)
    return made


def _around(function: Any, made: dict[int, FunctionType], given: dict[int, Any]) -> Any:
    """Return a callable around functions with those that were made in their place.

    Anything else as it is, and what is around a function that was not made.
    """
    if type(function) is functools.partial and id(function) in given:
        inner = _around(function.func, made, given)
        args, kwargs = given[id(function)]
        return functools.partial(inner, *args, **kwargs)
    if isinstance(function, MethodType) and id(function.__func__) in made:
        return MethodType(_around(function.__func__, made, given), function.__self__)
    return made.get(id(function), function)


def _functions(function: Any) -> Iterator[Any]:
    """Give the functions that a callable is made of, once each: those that they close over too, and
    partials and methods around them."""
    waiting, seen = [function], set[int]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        found = waiting.pop()
        if type(found) is functools.partial:
            yield found
            waiting.append(found.func)
        elif type(found) is MethodType:
            yield found
            waiting.append(found.__func__)
        elif type(found) is FunctionType and id(found) not in seen:
            seen.add(id(found))
            yield found
            names = zip(found.__code__.co_freevars, found.__closure__ or (), strict=True)
            waiting += [cell.cell_contents for name, cell in names if _is_set(name, cell)]


def _shared(value: Any) -> Any:
    return value


def _of_slots(value: Any) -> Any:
    """Return what an object whose state is in slots holds now, as a copy; any other one itself."""
    is_copied = has_slots_alone(type(value)) and has_state(value)
    return another_of(value) if is_copied else value


def _variable(
    place: Any, value: Any, thens: _Thens, then_of: Callable[[Any], Any] = _shared
) -> _Variable:
    kind = type(value)
    if kind not in CONTAINERS and not is_whole(kind):
        then = thens.get(id(value))
        if then is None and (then := then_of(value)) is not value:
            thens[id(value)] = then
        return _Variable(place, value, then)
    if id(value) in thens:
        return _Variable(place, value, thens[id(value)], _key_of(value, thens[id(value)]))
    thens[id(value)] = then = as_now(value)
    if then is value and isinstance(value, Iterator):
        tell_of_advance(value)
    return _Variable(place, value, then, _key_of(value, then))


def _key_of(value: Any, then: Any) -> int:
    return id(value) if is_pair(value, then) else 0


def _is_set(name: str, cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises where the variable has no value yet
    except ValueError:
        return False
    return name != "__class__"


@functools.lru_cache(maxsize=4096)
def _read_by(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that a code reads, and the codes within it."""
    found = [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found += _read_by(inner)
    return tuple(dict.fromkeys(found))


def variables_as_now(functions: Iterable[Any]) -> Callable[[], None]:
    """Return what has functions the variables that they close over now, with what these hold.

    Of globals only containers. What has too many values to be copied is left.

    Example:
        >>> seen = []
        >>> put_back = variables_as_now([lambda x: seen.append(x)])
        >>> seen.append(1)
        >>> put_back()
        >>> seen
        []
    """
    thens: _Thens = {}
    parts = [part for each in functions for part in _functions(each)]
    taken = [_Taken(part, thens) for part in parts if type(part) is FunctionType]
    cells = [(each.place, each.value) for one in taken for each in one.cells]
    copier = Copier()
    for each in (each for one in taken for each in (*one.cells, *one.globals)):
        if type(each.value) in CONTAINERS:
            with contextlib.suppress(TooLargeError):
                copier.copy(each.value)

    def put_back() -> None:
        for cell, value in cells:
            cell.cell_contents = value
        copier.put_back()

    return put_back
