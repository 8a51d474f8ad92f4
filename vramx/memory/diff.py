"""What grew between snapshots of one program, and whether it goes on growing: a leak.

Compared is what was live when each snapshot was taken, by the stack of its allocation; so all of
them should be taken at the same place of a step. A stack is a leak where its tensors become more
and more: in every interval between three or more snapshots; or between two, where those that are
new were allocated far apart and the first snapshot had some already. What a program
makes once (optimizer states in its first step, a cache) grows as well, but not steadily.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vramx.errors import InvalidValueError, brief
from vramx.memory.snapshot import Snapshot, check_snapshot
from vramx.memory.stacks import Stack, describe, shown_frames

# Of the allocations and frees between two snapshots, which pass more evenly than time does. Tensors
# that two steps keep are half of them apart, and those of more steps farther; what one of several
# steps makes lies closer together.
_LEAST_SPREAD = 1 / 3


@dataclass(frozen=True)
class Growth:
    """What the allocations of one stack were in each snapshot."""

    name: str
    stack: Stack
    bytes: tuple[int, ...]
    tensors: tuple[int, ...]
    largest_bytes: int  # of one tensor, in the last
    is_leak: bool

    @property
    def grown_bytes(self) -> int:
        """Bytes in the last snapshot beyond those in the first."""
        return self.bytes[-1] - self.bytes[0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the keys of the JSON report."""
        return {
            "name": self.name,
            "stack": [frame._asdict() for frame in self.stack],
            "bytes": list(self.bytes),
            "tensors": list(self.tensors),
            "grown_bytes": self.grown_bytes,
            "largest_bytes": self.largest_bytes,
            "is_leak": self.is_leak,
        }


@dataclass(frozen=True)
class _Kept:
    """The live allocations of one stack in one snapshot."""

    sizes: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]  # of the trace, in which they were made


def diff(snapshots: Sequence[Snapshot], *, steps: int | None = None) -> list[Growth]:
    """Return the stacks whose live memory changed, the largest growth first.

    Args:
        snapshots: two or more, in order of time, taken at the same place of a step.
        steps: how many steps lie between the first and the last; of two snapshots a stack is then
            a leak only if it keeps at least one tensor a step.

    Raises:
        InvalidValueError: there are less than two snapshots, or one is none; or steps are less
            than one.

    Example:
        >>> files = ["step1.pickle", "step3.pickle"]                     # doctest: +SKIP
        >>> found = diff([vramx.Snapshot.load(file) for file in files])  # doctest: +SKIP
        >>> [growth.name for growth in found if growth.is_leak]          # doctest: +SKIP
        ['train.py:21 <module>']
    """
    given = snapshots if isinstance(snapshots, Iterable) else [snapshots]
    snapshots = [check_snapshot(each) for each in given]
    if len(snapshots) < 2:
        raise InvalidValueError(f"{len(snapshots)} snapshot is too few; 2 or more are compared")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise InvalidValueError(f"steps {brief(steps)} is not accepted; 1, 2, ... are")
    kept = [_kept(snapshot) for snapshot in snapshots]
    since = _first_row_after(snapshots[-1], snapshots[0])
    between = range(since, len(snapshots[-1].trace))
    nothing = _Kept(np.zeros(0, np.int64), np.zeros(0, np.int64))
    found = []
    for stack in dict.fromkeys(stack for each in kept for stack in each):
        series = [each.get(stack, nothing) for each in kept]
        growth = Growth(
            name=describe(stack),
            stack=stack,
            bytes=tuple(int(each.sizes.sum()) for each in series),
            tensors=tuple(len(each.sizes) for each in series),
            largest_bytes=int(series[-1].sizes.max(initial=0)),
            is_leak=_is_leak(series, between, steps),
        )
        if len(set(growth.bytes)) > 1 or len(set(growth.tensors)) > 1:
            found.append(growth)
    return sorted(found, key=lambda growth: (-growth.grown_bytes, growth.name))


def _kept(snapshot: Snapshot) -> dict[Stack, _Kept]:
    """Return what is live at the end, by the frames that tell stacks apart."""
    allocations, made = snapshot.allocations, snapshot.rows_of_allocation
    ids = snapshot.live_at(snapshot.end_event)
    by_stack: dict[Stack, list[int]] = {}
    numbers = allocations.stack[ids].tolist()
    shown = {number: shown_frames(snapshot.stacks[number]) for number in set(numbers)}
    for number, id_ in zip(numbers, ids.tolist(), strict=True):
        by_stack.setdefault(shown[number], []).append(id_)
    return {
        stack: _Kept(allocations.size[members], made[members])
        for stack, members in by_stack.items()
    }


def _first_row_after(last: Snapshot, first: Snapshot) -> int:
    """Return where the last recording goes on after the end of the first; 0 if they share none."""
    elapsed_us = first.start_us + int(first.trace.time_us[-1]) - last.start_us
    if elapsed_us < 0:
        return 0
    return bisect.bisect_right(last.trace.time_us, elapsed_us, key=int)


def _is_leak(series: Sequence[_Kept], between: range, steps: int | None) -> bool:
    counts = [len(each.sizes) for each in series]
    if not all(earlier < later for earlier, later in pairwise(counts)):
        return False
    if len(series) > 2:
        return True
    grown = counts[-1] - counts[0]
    if not counts[0] or (steps is not None and grown < steps):
        return False
    since = series[-1].rows[series[-1].rows >= between.start]
    if len(since) < grown or not between.start:  # the last recording does not have all of it
        return steps is not None
    return len(since) > 1 and int(np.ptp(since)) >= _LEAST_SPREAD * len(between)
