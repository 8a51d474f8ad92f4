"""What is done around the calls of one module or function: the base class of every change.

A change belongs to one record and is copied and pickled with it, so it refers to no module. What
is said of a change in tables is its own to say. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Change:
    """One change; a module has at most one of each class.

    Attributes:
        INNERMOST: it stands for the forward itself, so that every other change is around it.
        mixin: a class to put before the module's own, None for none.
    """

    INNERMOST: ClassVar[bool] = False

    @property
    def mixin(self) -> type | None:
        return None

    def run(self, _module: Any, _forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make one call: of a module, None for a function's; and what it would call otherwise."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Say what is done, in a few words; nothing where that is no change of the results."""
        raise NotImplementedError

    def effect(self) -> str:
        """Say what came of it so far; empty where nothing is counted."""
        return ""

    def undone(self) -> None:
        """Let go of what the change holds outside of the record."""


class Restorable:
    """What is no module and was changed: how restore() undoes that, and what report() says."""

    __slots__ = ()

    def vramx_done(self) -> tuple[str, str]:
        """Return what is done, in a few words, and what came of it so far."""
        raise NotImplementedError

    def vramx_restore(self) -> None:
        """Undo it."""
        raise NotImplementedError
