"""Which of several is the fastest, by times that were taken of them in turns.

A host that other work disturbs is slower by tenths for seconds on end, and then for a single step:
two times tell little of two that differ by a hundredth, but if they are of one turn. So each is
compared with each other within the turns that both had, and what is slower in most is let go, for
what is left to have more turns. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import Generic, TypeVar

# What is slower than the best by this share is let go, as often as so many turns have been added.
_SLOWER, _EVERY = 0.02, 2

Name = TypeVar("Name", bound=Hashable)


class Turns(Generic[Name]):
    """What each took, turn by turn.

    Attributes:
        left: those that may be the fastest.
    """

    def __init__(self, names: Sequence[Name]) -> None:
        self.left = list(names)
        self._turns: list[Mapping[Name, float]] = []

    @property
    def order(self) -> list[Name]:
        """Whose time is to be taken in the next turn, in this order: every other one backwards."""
        return self.left[::-1] if len(self._turns) % 2 else list(self.left)

    def add(self, times: Mapping[Name, float]) -> None:
        """Add a turn, of all that are left."""
        self._turns.append(times)
        if len(self._turns) % _EVERY == 0:
            best = self.best()
            self.left = [each for each in self.left if self.ratio(each, best) <= 1 + _SLOWER]

    def best(self) -> Name:
        """Return the one that is slower than none, or by least."""
        return min(self.left, key=lambda each: max(self.ratio(each, it) for it in self.left))

    def ratio(self, one: Name, other: Name) -> float:
        """Return how long one takes, as a share of the other; before the first turn 1.

        Example:
            >>> turns = Turns(["a", "b"])
            >>> turns.add({"a": 10.0, "b": 11.0})
            >>> turns.add({"a": 20.0, "b": 22.0})  # the machine has become slower
            >>> turns.ratio("b", "a"), turns.left
            (1.1, ['a'])
        """
        both = [turn for turn in self._turns if one in turn and other in turn]
        return median(turn[one] / turn[other] for turn in both) if both else 1.0
