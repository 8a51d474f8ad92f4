"""What a program was doing at any time: calls of modules, backward passes and optimizer steps.

Made of marks, which have begins and ends in order of time. The span of a moment is the one that
began last and is open then, on whatever thread: autograd's own threads run while the one that asked
for backward waits. Pure; n log n in the marks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# What a mark is of.
FORWARD, BACKWARD, STEP = "forward", "backward", "step"
_LABELS = {BACKWARD: "(backward)", STEP: "(optimizer step)"}


class Mark(NamedTuple):
    """A call, a backward pass or a step that begins or ends.

    `label` is a module's path; `flag` says, of a forward that begins, whether a graph is recorded,
    and of one that ends whether it came to its end.
    """

    time: float
    kind: str
    begins: bool
    thread: int
    label: str = ""
    flag: bool = True


@dataclass
class Span:
    """A call, a backward pass or a step, while it lasts."""

    kind: str
    label: str
    begin: float
    records: bool
    outer: Span | None  # of a forward, the forward that it is part of
    end: float = math.inf
    completed: bool = False

    def outermost(self) -> Span:
        span = self
        while span.outer is not None:
            span = span.outer
        return span


class Timeline:
    """The spans of a log, and which of them is the innermost at any time."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._times: list[float] = []
        self._marks = marks
        self._current: list[Span | None] = []
        self._last_forward: list[Span | None] = []  # outermost, the last that has ended
        backwards = [mark for mark in marks if mark.kind == BACKWARD]
        self._backwards = [mark.time for mark in backwards if mark.begins]
        self.last_backward_end = max((m.time for m in backwards if not m.begins), default=-math.inf)
        opened: list[tuple[int, Span]] = []
        last = None
        for mark in marks:
            if mark.begins:
                opened.append((mark.thread, _opened(mark, opened)))
            else:
                ended = _close(mark, opened)
                if ended is not None and ended.kind == FORWARD and ended.outer is None:
                    if not ended.completed:
                        last = None
                    elif ended.records or last is None:
                        last = ended
                elif mark.kind != FORWARD:
                    last = None
            self._times.append(mark.time)
            self._current.append(opened[-1][1] if opened else None)
            self._last_forward.append(last)

    def at(self, time: float) -> Span | None:
        index = bisect_right(self._times, time) - 1
        return self._current[index] if index >= 0 else None

    def outlives(self, born: float, died: float, span: Span) -> bool:
        """Say whether what was made in a call is there when the outermost call is over.

        Or when backward begins, where that is called within it.
        """
        outermost = span.outermost()
        if not outermost.records:
            return False
        following = bisect_right(self._backwards, born)
        if following < len(self._backwards) and self._backwards[following] < outermost.end:
            return died > self._backwards[following]
        if not outermost.completed and not span.completed:
            return False
        return died > outermost.end or died == math.inf

    def is_kept_between(self, born: float, died: float) -> bool | None:
        """Say whether backward has what was made in no span; None where no backward follows."""
        index = bisect_right(self._times, born)
        before = self._last_forward[index - 1] if index else None
        if before is None or not before.records:
            return None
        # What is called in between, such as a loss or a metric, is passed over.
        after = next((mark for mark in self._marks[index:] if mark.kind != FORWARD), None)
        if after is None or (after.kind == BACKWARD and after.begins):
            return died == math.inf or (after is not None and died > after.time)
        return None


def _opened(mark: Mark, opened: list[tuple[int, Span]]) -> Span:
    outer = opened[-1][1] if opened else None
    if mark.kind != FORWARD or outer is None or outer.kind != FORWARD:
        outer = None
    label = _LABELS.get(mark.kind, mark.label)
    return Span(mark.kind, label, mark.time, mark.flag, outer)


def _close(mark: Mark, opened: list[tuple[int, Span]]) -> Span | None:
    """End the span that the mark is of; one whose beginning was not logged is passed over."""
    for index in range(len(opened) - 1, -1, -1):
        thread, span = opened[index]
        if thread == mark.thread and span.kind == mark.kind:
            span.end, span.completed = mark.time, mark.flag
            del opened[index]
            return span
    return None
