"""Containers that a region comes by in several ways: a recomputation has one of each.

A dictionary of features may be an argument of a region, an attribute of its module, and what a hook
writes into. Each of these is another file's (structure.py, attributes.py, functions.py), which
copies it for a recomputation; what the hook writes there the region is to find. So the copies of
one container are one, and that is the argument where it is one. Belongs to one run of one region.

A call costs a look at each argument, a recomputation one at each container.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vramx.recompute.copies import Copier
from vramx.recompute.wholes import CONTAINERS

_OPENED = (tuple, *CONTAINERS)
_MOST_DEPTH = 4  # of containers in containers
_Place = tuple[Any, ...]  # what leads to a container: numbers and keys
# The id of a container, and its copy from before the region ran. It was alive when all ids were
# taken; what else has its id later is asked for by none.
Pair = tuple[int, Any]


class Shared:
    """The containers among a region's arguments, by ids."""

    def __init__(self, arguments: tuple[Any, Any]) -> None:
        args, kwargs = arguments
        self._places: dict[int, _Place] = {}
        for each in (*args, *kwargs.values()):
            if type(each) in _OPENED:
                self._places = {id(found): place for place, found in _containers_in(arguments)}
                break

    def copier(self, arguments: tuple[Any, Any], pairs: Iterable[Pair]) -> Copier:
        """Return what copies the copies of `pairs` as one where the container is one.

        `arguments` are those of a recomputation.
        """
        copier = Copier()
        thens: dict[int, dict[int, Any]] = {}
        for key, then in pairs:
            thens.setdefault(key, {})[id(then)] = then
        for key, copies in thens.items():
            place = self._places.get(key)
            if place is None and len(copies) == 1:
                continue
            first = next(iter(copies.values()))
            made = copier.copy_of(first) if place is None else _at(arguments, place)
            for then in copies.values():
                copier.take(then, made)
        return copier


def is_pair(value: Any, then: Any) -> bool:
    """Tell whether a value is a container of which there is a copy from before."""
    return type(value) in CONTAINERS and then is not value


def _containers_in(value: Any, depth: int = _MOST_DEPTH) -> Iterator[tuple[_Place, Any]]:
    """Give the containers in a tuple or a container, each with its place."""
    if isinstance(value, set) or not depth:
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if type(each) in CONTAINERS:
            yield (key,), each
        if type(each) in _OPENED:
            yield from (((key, *place), found) for place, found in _containers_in(each, depth - 1))


def _at(value: Any, place: _Place) -> Any:
    for key in place:
        value = value[key]
    return value
