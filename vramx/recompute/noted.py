"""What is noted of objects for as long as they live, each by itself.

A dictionary of weak references compares its keys. Some modules and objects compare by what they
hold, element by element even, and then have no hash, or no truth value of `==`. Those have a
dictionary that goes by identity, which takes ten times as long: some microseconds. Any thread.

A module may be part of several regions and run in one of them. So what a region does not do with it
is noted of that region alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, Generic, TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Value = TypeVar("Value")


class Noted(Generic[Value]):
    """A value for each of some objects, which it does not keep alive."""

    def __init__(self) -> None:
        self._plain: weakref.WeakKeyDictionary[Any, Value] = weakref.WeakKeyDictionary()
        self._comparing: Any = WeakIdKeyDictionary()

    def beside(self, owner: Any) -> MutableMapping[Any, Value]:
        """Return the dictionary that an object is a key of.

        Example:
            >>> notes, layer = Noted[int](), type("Layer", (), {})()
            >>> notes.beside(layer)[layer] = 1
            >>> notes.beside(layer).get(layer)
            1
        """
        cls: Any = type(owner)
        is_plain = cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__
        found: MutableMapping[Any, Value] = self._plain if is_plain else self._comparing
        return found


RegionKind = tuple[int, int]  # see kind_of
ANY_REGION: RegionKind = (0, 0)
# What so many have shown holds for all: their code may be made anew in each step.
MOST_REGIONS = 64


def kind_of(function: Any, modules: Sequence[nn.Module]) -> RegionKind:
    """Return what tells a region from others that reach the same modules, `function`'s own first.

    Example:
        >>> net = nn.Identity()
        >>> kind_of(net.forward, [net]) == kind_of(net.forward, [net])
        True
        >>> kind_of(net.forward, [net]) == kind_of(net.extra_repr, [net])
        False
    """
    while isinstance(function, functools.partial):
        function = function.func
    own = getattr(function, "__func__", function)
    # A lambda is a new function in each step, of the same code.
    return id(modules[0]) if modules else 0, id(getattr(own, "__code__", type(own)))


class Regions(set[RegionKind]):
    """Kinds of regions, by their ids: of one that is gone another may have them."""

    def note(self, region: RegionKind) -> None:
        if len(self) < MOST_REGIONS:
            self.add(region)

    def include(self, region: RegionKind) -> bool:
        return region in self or len(self) >= MOST_REGIONS
