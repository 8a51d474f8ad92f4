"""The change of a function, or of a method for all instances of a class.

A wrapper holds a record that it reads at each call, so that it can be undone below decorators that
were put around it since. Whatever keeps to functools.wraps, and partials, are looked through.
Wrapping a class is not thread-safe; a call costs a fraction of a microsecond.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vramx.errors import InvalidValueError
from vramx.patch.change import Change

_HOLDER = "_vramx_holder"
_MOST_LINKS = 64


class Holder:
    """What a wrapper reads: its change, None once it is undone, and what it was put around."""

    def __init__(self, function: Callable[..., Any], change: Change) -> None:
        self.function = function
        self.change: Change | None = change
        self.inherited = False  # the class had the method from another


def wrap(function: Callable[..., Any], change: Change, *, method: bool = False) -> Any:
    """Return a function with a change around it; a method's first argument is its module.

    Raises:
        InvalidValueError: it only makes a generator or a coroutine, whose code runs later.
    """
    check_runs_at_once(function)
    holder = Holder(function, change)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        change = holder.change
        if change is None:
            return function(*args, **kwargs)
        return change.run(args[0] if method else None, function, *args, **kwargs)

    setattr(wrapped, _HOLDER, holder)
    return wrapped


def check_runs_at_once(function: Any) -> None:
    """Refuse a function whose call returns before its code has run.

    Raises:
        InvalidValueError: it makes a generator or a coroutine.
    """
    function = inspect.unwrap(function) if callable(function) else function
    for kind, what in (
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isasyncgenfunction, "an asynchronous generator"),
    ):
        if kind(function):
            raise InvalidValueError(
                f"{function.__qualname__} makes {what}: its code runs after the call has returned, "
                "where nothing is around it; accepted are functions that compute before they return"
            )


def holder_of(function: Any) -> Holder | None:
    """Return the record of a wrapped function that is still changed; None where there is none."""
    for link in _links(function):
        holder = getattr(link, "__dict__", {}).get(_HOLDER)
        if isinstance(holder, Holder) and holder.change is not None:
            return holder
    return None


def _links(function: Any) -> Iterator[Any]:
    for _ in range(_MOST_LINKS):
        yield function
        below = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
        function = getattr(function, "func", None) if below is None else below
        if function is None:
            return


def wrap_method(cls: type[torch.nn.Module], name: str, change: Change) -> None:
    """Put a change around a method of a class, for instances that exist as well."""
    own = cls.__dict__.get(name)
    found = own if own is not None else getattr(cls, name)
    holder = holder_of(found)
    if own is not None and holder is not None:
        holder.change = change
        return
    wrapped = wrap(found if holder is None else holder.function, change, method=True)
    getattr(wrapped, _HOLDER).inherited = own is None
    setattr(cls, name, wrapped)


def clear_function(function: Any) -> Change | None:
    """Undo the change of a function, whatever decorators are around it; return the change."""
    holder = holder_of(function)
    if holder is None:
        return None
    change, holder.change = holder.change, None
    return change


def clear_class(cls: type) -> tuple[Change, ...]:
    """Undo the changes of a class's own methods; return them."""
    changes = []
    for name, method in list(vars(cls).items()):
        holder = holder_of(method)
        if holder is None or holder.change is None:
            continue
        changes.append(holder.change)
        holder.change = None
        if getattr(method, "__code__", None) is not _CODE:
            continue  # it is below a decorator
        if holder.inherited:
            delattr(cls, name)
        else:
            setattr(cls, name, holder.function)
    return tuple(changes)


_CODE = wrap(len, Change()).__code__
