"""Of which kinds the attributes of modules are, so that what is worked out of them is found once.

A program gives a module something to call, a cache or a list, where it had None before. So what is
known of attributes holds as long as they have the same names, and values of the same types. Of a
layer of torch, which changes nothing of its own, their names say as much. Any thread; a look takes
half a microsecond.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vramx.recompute.noted import Noted

# What every module has beside what is as it was: members, hooks, what is done to it.
OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_vramx", "_compiled_call_impl"}) - {"training"}
# The names of all attributes, and the types of what they are.
Kinds = tuple[tuple[str, ...], tuple[type, ...]]


def kinds_of(values: dict[str, Any]) -> Kinds:
    """Return what tells attributes whose values are of other kinds than they were."""
    return tuple(values), tuple(map(type, values.values()))


def is_inert(owner: Any) -> bool:
    """Tell whether a module changes nothing of its own while it runs."""
    return type(owner).__module__.startswith("torch.nn.modules.")


class Chosen:
    """The attributes of a module whose values are of certain types, but for those of `left`.

    Example:
        >>> module = nn.Module()
        >>> module.calls = []
        >>> Chosen((list,)).names_of(module)
        ('calls',)
    """

    def __init__(self, types: tuple[type, ...], left: frozenset[str] = frozenset()) -> None:
        self._types = types
        self._left = OF_EVERY_MODULE | left
        self._noted: Noted[tuple[Any, tuple[str, ...]]] = Noted()

    def names_of(self, module: nn.Module) -> tuple[str, ...]:
        own, notes = vars(module), self._noted.beside(module)
        key = tuple(own) if is_inert(module) else kinds_of(own)
        known = notes.get(module)
        if known is None or known[0] != key:
            names = own.keys() - self._left
            known = key, tuple(name for name in names if isinstance(own[name], self._types))
            notes[module] = known
        return known[1]
