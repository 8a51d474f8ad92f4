"""Methods that ask for the class of their module, and mean the class that they are written in.

A changed module is of a subclass: for these methods something stands behind it, or they run while
the module is of its own class. Not responsible for what refers to a class by its name. Pure; a look
at each method of a class, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def asked_of_super(original: Any) -> dict[str, Any]:
    """Return what stands behind a class of ours for methods that ask super(type(self), self).

    They mean the class below the one they are written in, and would find themselves.
    """

    def passed_on(name: str) -> Callable[..., Any]:
        def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return getattr(super(original, self), name)(*args, **kwargs)

        return method

    named = {name: _names_in(each) for name, each in vars(original).items()}
    # Others that have these names, as those that ask super(), find what they found before.
    return {
        name: passed_on(name)
        for name, names in named.items()
        if "super" in names and ("type" in names or "__class__" in names)
    }


def asked_of_class(original: Any) -> dict[str, Any]:
    """Return methods that are to run while a module is of its own class.

    torch.fx makes a class for each module and writes into it, through type(self), what runs the
    module's graph; a copy of such a module has a class that is made anew.
    """
    if original.__new__ is object.__new__:
        return {}  # it makes no classes
    methods: dict[str, Any] = {}
    for base in reversed(original.__mro__):
        if not issubclass(nn.Module, base):
            methods |= vars(base)
    return {
        name: _as_of(original, name)
        for name, each in methods.items()
        if name == "__deepcopy__" or {"type", "vars"} <= set(_names_in(each))
    }


def _as_of(original: Any, name: str) -> Callable[..., Any]:
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        ours = type(self)
        object.__setattr__(self, "__class__", original)
        try:
            return getattr(self, name)(*args, **kwargs)
        finally:
            object.__setattr__(self, "__class__", ours)

    return method


def _names_in(method: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(getattr(method, "__code__", None), "co_names", ())
    return names
