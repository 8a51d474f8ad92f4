"""What is worked out once of a class, and forgotten with it.

A program makes classes as it runs: each trial of a search that of its model, and parametrize one
for each module. A cache that held them would hold what their methods close over. Any thread; a
look-up costs a quarter of a microsecond.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

Found = TypeVar("Found")
# What was found of classes that are gone waits until there are as many.
_MOST = 4096


def found_of(function: Callable[..., Found]) -> Callable[..., Found]:
    """Remember what a function of classes finds, which does not refer to them.

    Example:
        >>> found_of(lambda cls: cls.__name__)(int)
        'int'
    """
    known = lru_cache(maxsize=_MOST)(lambda *classes: function(*(each() for each in classes)))

    @wraps(function)
    def found(*classes: Any) -> Found:
        return known(*map(weakref.ref, classes))

    return found


def made_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the subclass that a function makes of its first argument, as long as it is used.

    Example:
        >>> make = made_of(lambda cls: type(cls.__name__, (cls,), {}))
        >>> made = make(dict)
        >>> make(dict) is made
        True
    """
    every: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    @wraps(function)
    def made(cls: Any, *others: Any) -> Any:
        key = weakref.ref(cls), *others
        found = every.get(key)
        return every.setdefault(key, function(cls, *others)) if found is None else found

    return made
