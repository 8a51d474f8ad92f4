"""Values that change in place and have no parts by which to see it: iterators and arrays.

A region that takes the next item of an iterator takes the one after it when it is recomputed, and
one that writes into an array of numpy finds there what it wrote. So both are copied, as containers
are. An iterator that has attributes is an object like others (objects.py). Pure functions; a copy
takes a microsecond, and of an array as long as its bytes take.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from torch import Tensor

from vramx.errors import warn_once
from vramx.patch.of_classes import found_of

CONTAINERS = (dict, list, set, deque, defaultdict, OrderedDict, Counter)
# Of a container, and of an array, that are looked at in each call.
_MOST_ITEMS = 256
_MOST_DEPTH = 4  # of containers in containers
_MOST_BYTES = 1 << 20


def _is_array(cls: type) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(cls, numpy.ndarray)


def _is_whole(cls: Any) -> bool:
    """Tell whether values of a class change in place and have no parts by which to see it.

    That are arrays of numpy, and iterators without attributes, such as those of containers.

    Example:
        >>> is_whole(type(iter([1]))), is_whole(zip), is_whole(list)
        (True, True, False)
    """
    return _is_array(cls) or (issubclass(cls, Iterator) and not cls.__dictoffset__)


is_whole = found_of(_is_whole)


class _NoOtherError(Exception):
    """There is only the one."""


def another(whole: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a copy of an array, or an iterator that gives the same items next.

    Itself where there is none: of a generator, of what calls a function, of most that libraries
    make, and from Python 3.14 on of itertools. `known` has the copies that were made, by id.

    Example:
        >>> numbers = iter([1, 2])
        >>> next(another(numbers)), next(numbers)
        (1, 1)
    """
    if _is_array(type(whole)):
        return whole.copy()
    made = {} if known is None else dict(known)
    try:
        other = _other(whole, made)
    except _NoOtherError:
        return whole
    if known is not None:
        known.update(made)
    return other


def _other(iterator: Any, made: dict[int, Any]) -> Any:
    """Return an iterator that takes from others of those that this one takes from."""
    if id(iterator) in made:
        return made[id(iterator)]
    kind: Any = type(iterator)
    if hasattr(kind, "__copy__"):  # of itertools.tee, which shares what it has taken
        other = copy.copy(iterator)
    elif kind.__reduce__ is object.__reduce__ or kind is _CALLING:
        raise _NoOtherError
    else:
        try:
            other = _made_again(iterator.__reduce__(), made)
        except Exception:  # whatever a library's has to say of it
            raise _NoOtherError from None
    made[id(iterator)] = other
    return other


def _made_again(reduced: Any, made: dict[int, Any]) -> Any:
    make, given, *states = reduced
    other = make(*(_others_in(each, made) for each in given))
    for state in states:
        if state is not None:
            other.__setstate__(_state_of(state, made))
    return other


# Its function has a state of its own.
_CALLING = type(iter(int, 1))


def _others_in(value: Any, made: dict[int, Any]) -> Any:
    """Return what an iterator is of, with others of the iterators that it holds."""
    if isinstance(value, Iterator):
        return _other(value, made)
    if type(value) not in (tuple, list) or len(value) > _MOST_ITEMS:
        return value
    if not any(isinstance(each, Iterator) for each in value):
        return value
    return type(value)(_others_in(each, made) for each in value)


def _state_of(state: Any, made: dict[int, Any]) -> Any:
    """Return the same of a state; of a cycle it has the items so far, to which the cycle adds."""
    if type(state) is not tuple:
        return _others_in(state, made)
    return tuple(copy.copy(x) if type(x) is list else _others_in(x, made) for x in state)


def has_no_other(value: Any) -> bool:
    """Tell whether a value is an iterator that cannot be copied.

    Example:
        >>> has_no_other(iter([1])), has_no_other(i for i in [1])
        (False, True)
    """
    if not isinstance(value, Iterator) or isinstance(value, io.IOBase):  # which is for writing
        return False
    if is_whole(type(value)):
        return another(value) is value
    try:
        copy.copy(value)
    except Exception:  # as of a loader of data
        return True
    return False


def as_now(value: Any, depth: int = _MOST_DEPTH) -> Any:
    """Return a copy of a container, an iterator or an array, if it is small; else the value.

    What a container holds is shared, but for other containers.

    Example:
        >>> outputs = {"layer": [1]}
        >>> as_now(outputs)["layer"] is outputs["layer"]
        False
    """
    kind: Any = type(value)
    if kind in CONTAINERS:
        if len(value) > _MOST_ITEMS:
            return value
        made = copy.copy(value)
        for place, each in _inner(value) if depth else ():
            made[place] = as_now(each, depth - 1)
        return made
    if not is_whole(kind) or (_is_array(kind) and value.nbytes > _MOST_BYTES):
        return value
    return another(value)


def _inner(container: Any) -> list[tuple[Any, Any]]:
    """Return the containers that a container holds, with their places."""
    if isinstance(container, set):
        return []
    places = container.items() if isinstance(container, dict) else enumerate(container)
    return [(place, each) for place, each in places if type(each) in CONTAINERS]


def tensors_held(container: Any, depth: int = _MOST_DEPTH) -> Iterator[Tensor]:
    """Give the tensors that a container holds, and those in containers that it holds.

    Example:
        >>> len(list(tensors_held({"sums": [Tensor(), Tensor()], "steps": 3})))
        2
    """
    for each in container.values() if isinstance(container, dict) else container:
        if isinstance(each, Tensor):
            yield each
        elif type(each) in CONTAINERS and depth:
            yield from tensors_held(each, depth - 1)


def is_other(then: Any, now: Any) -> bool:
    """Tell whether a value may be another than its copy: how far an iterator is cannot be seen."""
    return not _is_array(type(now)) or then.tobytes() != now.tobytes()


def progress_of(iterator: Any, depth: int = _MOST_DEPTH) -> Any:
    """Return what differs where an iterator without copies has gone on.

    Of what does not tell, something else each time.
    """
    kind = type(iterator)
    if kind is GeneratorType:
        frame = iterator.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, [id(value) for value in frame.f_locals.values()]
    if kind.__dictoffset__:
        return [(name, _progress_in(each, depth - 1)) for name, each in vars(iterator).items()]
    if kind.__module__ != "itertools" or kind is itertools.cycle:
        return object()
    return repr(iterator), [_progress_in(each, depth - 1) for each in gc.get_referents(iterator)]


def _progress_in(value: Any, depth: int) -> Any:
    """Return what differs where what an iterator refers to was taken from."""
    if type(value) in (tuple, list) and len(value) <= _MOST_ITEMS and depth:
        return [_progress_in(each, depth - 1) for each in value]
    if not isinstance(value, Iterator) or not depth:
        return id(value)
    if type(value) is GeneratorType or type(value).__module__ == "itertools":
        return progress_of(value, depth)
    left = operator.length_hint(value, -1)
    return left, [_progress_in(each, depth - 1) for each in gc.get_referents(value)]


def tell_of_advance(iterator: Any) -> None:
    """Say once that a region has an iterator of which there is no other."""
    warn_once(
        f"a region under vramx.checkpoint reaches a {type(iterator).__name__}, which cannot be "
        "copied: what the region takes from it is another item when it is recomputed; take the "
        "items ahead of the call",
        stacklevel=7,
    )
