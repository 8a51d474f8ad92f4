"""Values that change in place and have no parts by which to see it: iterators and arrays.

A region that takes the next item of an iterator takes the one after it when it is recomputed, and
one that writes into an array of numpy finds there what it wrote. So both are copied, as containers
are. An iterator that has attributes is an object like others (objects.py). Pure functions; a copy
takes a microsecond, and of an array as long as its bytes take.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

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


def another(whole: Any) -> Any:
    """Return a copy of an array, or an iterator that gives the same items next.

    Itself where there is none: of a generator, and from Python 3.14 on of itertools.

    Example:
        >>> numbers = iter([1, 2])
        >>> next(another(numbers)), next(numbers)
        (1, 1)
    """
    if _is_array(type(whole)):
        return whole.copy()
    try:
        made, given, *state = whole.__reduce__()
    except TypeError:
        return whole
    again = made(*(another(each) if isinstance(each, Iterator) else each for each in given))
    for each in state:
        if each is not None:  # of a cycle also the items that it has seen, to which it adds
            again.__setstate__(tuple(map(copy.copy, each)) if type(each) is tuple else each)
    return again


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


def is_other(then: Any, now: Any) -> bool:
    """Tell whether a value may be another than its copy: how far an iterator is cannot be seen."""
    return not _is_array(type(now)) or then.tobytes() != now.tobytes()


def progress_of(generator: GeneratorType[Any, Any, Any]) -> Any:
    """Return what differs where a generator has gone on, as far as its frame tells."""
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, [id(value) for value in frame.f_locals.values()]


def tell_of_advance(iterator: Any) -> None:
    """Say once that a region has an iterator of which there is no other."""
    warn_once(
        f"a region under vramx.checkpoint reaches a {type(iterator).__name__}, which cannot be "
        "copied: what the region takes from it is another item when it is recomputed; take the "
        "items ahead of the call",
        stacklevel=7,
    )
