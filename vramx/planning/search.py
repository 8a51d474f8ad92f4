"""Which batch is tried next, from the peaks of those that were: the largest that fits, soon.

Let above(n) be the peak of a step with a batch of n, less what is there without any step. It is the
largest of some lines of n, one for each moment of the step, and none of them is below zero at 0:
gradients and workspaces are there whatever the batch. So above(k n) <= k above(n), and a batch of
n * room / above(n) fits without fail. That is tried, until two steps foretold a third: then memory
is a line, and what the line says is tried. What runs out of memory all the same bounds the search.
Pure; constant time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# By how much of what was added a peak may be off what the two before it foretold, for a line.
_FORETOLD = 0.02


@dataclass
class Search:
    """The largest batch within a room.

    Args:
        room_bytes: what a step may take above what is there without one.
        start, most: the batch that is tried first, and the largest; None: no largest.
    """

    room_bytes: int
    start: int
    most: int | None = None
    points: list[tuple[int, int]] = field(default_factory=list)  # batch, bytes above; by batch
    too_large: int | None = None  # the smallest batch that did not fit
    tried: int = 0

    @property
    def best(self) -> int | None:
        """The largest batch that was seen to fit."""
        return max((n for n, above in self.points if above <= self.room_bytes), default=None)

    def note(self, batch: int, above_bytes: int | None) -> None:
        """Note a batch that was tried; None is out of memory."""
        self.tried += 1
        if above_bytes is not None:
            self.points = sorted({**dict(self.points), batch: above_bytes}.items())
        if above_bytes is None or above_bytes > self.room_bytes:
            self.too_large = min(batch, self.too_large or batch)

    def foretells(self, batch: int) -> bool:
        """Tell whether a batch must fit by what is known."""
        best = self._best_point()
        return best is not None and batch * best[1] <= best[0] * self.room_bytes

    def next(self) -> int | None:
        """Return the batch to try next; None: the largest is known, or enough was tried."""
        best = self._best_point()
        if best is None:
            return self._smaller()
        if self.tried >= self._enough():
            return None
        wanted = self._above(best) if self.too_large is None else self._between(best)
        if self.most is not None:
            wanted = min(wanted, self.most)
        return wanted if wanted != best[0] else None

    def _above(self, best: tuple[int, int]) -> int:
        """Return what is tried while all has fitted."""
        wanted = self._by_proportion(best)
        if self._foretold():
            return max(wanted, self._on_line())
        if wanted > best[0]:
            return wanted
        if len(self.points) == 1 and best[0] > 1:
            return best[0] // 2  # a smaller one fits, and makes a line with this
        return min(self._on_line(), 2 * best[0])

    def _between(self, best: tuple[int, int]) -> int:
        """Return what is tried between the best and what did not fit."""
        assert self.too_large is not None
        middle = (best[0] + self.too_large) // 2
        above = dict(self.points).get(self.too_large)
        if self.tried % 2:  # where what is foretold is far off, halves end the search
            return middle
        if above is None:  # out of memory, by how much is not known
            wanted = self._above(best)
        else:  # a chord is nowhere below what it is a chord of
            wanted = largest_on(line_of([best, (self.too_large, above)]), self.room_bytes, middle)
        return wanted if best[0] < wanted < self.too_large else middle

    def _smaller(self) -> int | None:
        if self.too_large is None:
            return self.start
        if self.too_large == 1:
            return None
        known = dict(self.points).get(self.too_large)
        wanted = (
            self.too_large // 2 if known is None else self._by_proportion((self.too_large, known))
        )
        return max(1, min(wanted, self.too_large - 1))

    def _best_point(self) -> tuple[int, int] | None:
        best = self.best
        return None if best is None else (best, dict(self.points)[best])

    def _by_proportion(self, point: tuple[int, int]) -> int:
        batch, above = point
        if above <= 0:
            return 2 * batch
        return batch * self.room_bytes // above

    def _on_line(self) -> int:
        """Return the largest batch by the line through the last two points, of one point twice."""
        last = self.points[-1][0]
        if len(self.points) == 1:
            return 2 * last
        return largest_on(line_of(self.points[-2:]), self.room_bytes, self.most or 2 * last)

    def _foretold(self) -> bool:
        """Tell whether the last of three points is where the line of the others has it."""
        if len(self.points) < 3:
            return False
        *two, (batch, above) = self.points[-3:]
        line = line_of(two)
        foretold = line[0] + line[1] * batch
        return abs(foretold - above) <= _FORETOLD * abs(above - two[1][1])

    def _enough(self) -> int:
        top = self.too_large or self.most or self.best or self.start
        return math.ceil(math.log2(max(2, top))) + 3


def line_of(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return where the line through two points is at 0, and its slope.

    Example:
        >>> line_of([(2, 14), (4, 24)])
        (4.0, 5.0)
    """
    (n, below), (m, above) = points
    slope = (above - below) / (m - n)
    return below - slope * n, slope


def largest_on(line: tuple[float, float], room_bytes: int, level: int) -> int:
    """Return the largest batch of which a line is within a room; `level` where it does not rise."""
    at_zero, slope = line
    if slope <= 0:
        return level
    return max(0, math.floor((room_bytes - at_zero) / slope))
