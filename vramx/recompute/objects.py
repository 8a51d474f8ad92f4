"""Arguments that are no tensors but change, such as a cache: as they were before the call.

A region that runs again must find its arguments as the first run did. A cache of keys and values
that is appended to has twice as many the second time; a list or a counter in an object has one more
item, and an iterator is an item further. So a recomputation is given a copy: new objects and
containers around the same tensors. The first run has the caller's own. Not responsible for
containers that torch's pytree opens (structure.py), nor for what a region reaches without its
arguments.

Some tenths of a microsecond for each value in an object; any thread.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vramx.errors import RecomputationError, warn_once
from vramx.recompute.copies import (
    SHARED,
    Copier,
    Forgetting,
    TooLargeError,
    differs,
    has_state,
    is_cache,
)
from vramx.recompute.tensors import has_graph, version_of
from vramx.recompute.wholes import has_no_other, is_whole, tell_of_advance


class Before:
    """An argument that is an object, as it was before the region ran.

    `generators` are those of random numbers in it, which a recomputation sets back.
    """

    def __init__(self, value: Any) -> None:
        copier = Copier()
        self._copy = copier.copy(value)
        self.generators = copier.generators
        self._name = type(value).__name__
        self._is_cache = is_cache(value)
        self._tensors = [(tensor, version_of(tensor)) for tensor in copier.tensors]
        self._now: Any = value  # until the region has run

    def again(self) -> Any:
        """Return the argument for a recomputation, which may change it."""
        return Copier().copy(self._copy)

    def give_up(self) -> None:
        """Look no more at the argument: the region has failed."""
        self._now, self._tensors = None, []

    def check(self) -> None:
        """See what the region did to the argument.

        Raises:
            RecomputationError: it wrote into a tensor of it, and would do so again.
        """
        now, self._now = self._now, None
        if any(version_of(tensor) != version for tensor, version in self._tensors):
            hint = "; pass use_cache=False, or a cache that grows" if self._is_cache else ""
            raise RecomputationError(
                f"a checkpointed region writes into a tensor of its argument, a {self._name}, and "
                f"would do so again when it is recomputed{hint}"
            )
        has_graphs = any(has_graph(tensor) for tensor, _ in self._tensors)
        self._tensors = []
        if has_graphs and differs(self._copy, now):
            # What it was may hold an earlier call, and that one what was there before it.
            self._copy = Forgetting().copy_of(self._copy)
        if self._is_cache:
            warn_once(
                f"a checkpointed layer fills a {self._name}, which keeps every layer's keys and "
                "values until the step ends; use_cache=False in the model's config or in the call "
                "makes none",
                stacklevel=6,
            )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that an object refers to, each as often as it does.

    Example:
        >>> from types import SimpleNamespace
        >>> len(tensors_in(SimpleNamespace(keys=[Tensor(), Tensor()])))
        2
    """
    copier = Copier()
    copier.copy(value)
    return copier.tensors


def as_before(leaf: Any) -> Any:
    """Return what stands for an argument in the meantime: itself, if nothing in it can change.

    Example:
        >>> from types import SimpleNamespace
        >>> as_before(3), type(as_before(SimpleNamespace(items=[]))).__name__
        (3, 'Before')
    """
    if isinstance(leaf, SHARED) or not (has_state(leaf) or is_whole(type(leaf))):
        return leaf
    if has_no_other(leaf):
        tell_of_advance(leaf)
        return leaf
    try:
        return Before(leaf)
    except TooLargeError:
        return leaf
