"""What live memory is for: the category of each allocation of a run, from what was seen of it.

Pure: a log of what a program did (calls of modules, backward passes, optimizer steps) and of whose
memory was seen at which address, and the allocations with the times of their birth and death. Only
the order of times counts, so they may be microseconds or numbers of events. Nothing is guessed from
names. Each allocation has exactly one category, by the first of these rules that applies:

    1  what it was seen to be: parameters, gradients, optimizer, packed
    2  workspaces: never freed, of the size of a library's workspace, and not made between calls;
       of a size that tensors have as well, only the first that is made in forward and the first in
       backward, if a backward pass ends after it: there activations go
    3  made in a module's forward: activations, if it outlives the outermost call (or is alive when
       backward begins within that) and that call recorded a graph; else temporaries
    4  made in backward or in an optimizer's step: temporaries
    5  inputs, if it was seen as an argument of the model
    6  made between the forward and the backward that follows it: activations, if it is alive when
       that backward begins; else temporaries
    7  unknown

A call that did not come to its end (out of memory, say) has activations as well: what outlives the
innermost call, which ended, and is there when the outermost one fails. n log n in both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vramx.memory.spans import FORWARD, Mark, Timeline
from vramx.memory.workspaces import RARE_BYTES

PARAMETERS = "parameters"  # and buffers
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
PACKED = "packed"
INPUTS = "inputs"
WORKSPACES = "workspaces"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
UNKNOWN = "unknown"  # torch's viewer wants one entry to have this very name
CATEGORIES = (
    *(PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, PACKED),
    *(TEMPORARIES, INPUTS, WORKSPACES, UNKNOWN),
)
OUTSIDE_MODULES = "(outside modules)"
# Seen memory in this order: what has been seen as two of them is the first.
_SEEN = (PARAMETERS, GRADIENTS, OPTIMIZER, PACKED)


class Seen(NamedTuple):
    """Memory that was known to be alive and of a category; the label is the tensor's name."""

    time: float
    address: int
    size_bytes: int
    category: str
    label: str = ""


class Allocation(NamedTuple):
    """An allocation: -inf and inf stand for times outside of what was recorded."""

    address: int
    size_bytes: int
    born: float
    died: float


class Found(NamedTuple):
    """What an allocation is for: its category, and whose it is (a module's path, a name)."""

    category: str
    label: str = ""


@dataclass
class Log:
    """What was seen of a run, in order of time.

    `clock_error` is by how much its times may be off from those of allocations.
    """

    marks: Sequence[Mark] = ()
    seen: Sequence[Seen] = ()
    clock_error: float = 0.0


def categorize(
    allocations: Sequence[Allocation], log: Log, workspace_sizes: Iterable[int] = ()
) -> list[Found]:
    """Return what each allocation is for.

    Args:
        allocations: in any order; of one address no two live at the same time.
        log: marks in order of time; the seen in any order.
        workspace_sizes: bytes that libraries take for their workspaces.

    Example:
        >>> log = Log([Mark(1, FORWARD, True, 0, "fc"), Mark(3, FORWARD, False, 0)])
        >>> categorize([Allocation(512, 100, 2, 9), Allocation(1024, 100, 2, 2.5)], log)
        [Found(category='activations', label='fc'), Found(category='temporaries', label='fc')]
    """
    seen = _seen_of(allocations, log)
    timeline = Timeline(log.marks)
    workspaces = _workspaces(allocations, seen, timeline, frozenset(workspace_sizes))
    return [
        Found(WORKSPACES)
        if index in workspaces
        else _found(allocation, seen.get(index, {}), timeline)
        for index, allocation in enumerate(allocations)
    ]


def _workspaces(
    allocations: Sequence[Allocation],
    seen: dict[int, dict[str, str]],
    timeline: Timeline,
    sizes: frozenset[int],
) -> frozenset[int]:
    """Return which allocations are workspaces, by the second rule."""
    candidates = [
        (each.born, index)
        for index, each in enumerate(allocations)
        if each.died == math.inf
        and each.size_bytes in sizes
        and seen.get(index, {}).keys().isdisjoint(_SEEN)
    ]
    found: dict[Any, int] = {}  # by what there is one of
    for _, index in sorted(candidates):
        each = allocations[index]
        span = timeline.at(each.born)
        if each.size_bytes >= RARE_BYTES:
            if span is not None or each.born == -math.inf:
                found[index] = index
        elif span is not None and each.born < timeline.last_backward_end:
            found.setdefault((each.size_bytes, span.kind == FORWARD), index)
    return frozenset(found.values())


def _found(allocation: Allocation, seen: dict[str, str], timeline: Timeline) -> Found:
    span = timeline.at(allocation.born)
    label = span.label if span is not None else ""
    for category in _SEEN:
        if category in seen:
            return Found(category, seen[category] or label)
    if span is not None:
        is_forward = span.kind == FORWARD
        is_kept = is_forward and timeline.outlives(allocation.born, allocation.died, span)
        return Found(ACTIVATIONS if is_kept else TEMPORARIES, label)
    if INPUTS in seen:
        return Found(INPUTS, seen[INPUTS])
    is_for_backward = timeline.is_kept_between(allocation.born, allocation.died)
    if is_for_backward is None:
        return Found(UNKNOWN)
    return Found(ACTIVATIONS if is_for_backward else TEMPORARIES, OUTSIDE_MODULES)


def _seen_of(allocations: Sequence[Allocation], log: Log) -> dict[int, dict[str, str]]:
    """Return, of each allocation that was seen, the categories it was seen in and its names."""
    by_address: dict[int, list[tuple[float, int]]] = {}
    for index, allocation in enumerate(allocations):
        by_address.setdefault(allocation.address, []).append((allocation.born, index))
    for lives in by_address.values():
        lives.sort()
    found: dict[int, dict[str, str]] = {}
    for each in log.seen:
        alive = _alive(allocations, by_address.get(each.address, []), each, log.clock_error)
        if alive is not None:
            names = found.setdefault(alive, {})
            names[each.category] = names.get(each.category) or each.label
    return found


def _alive(
    allocations: Sequence[Allocation],
    lives: Sequence[tuple[float, int]],
    seen: Seen,
    clock_error: float,
) -> int | None:
    """Return the allocation of an address that was alive when memory was seen there.

    Where the clocks leave it open, it is the one of the size, then the nearest, then the later.
    """
    place = bisect_right(lives, (seen.time, len(allocations)))
    best: tuple[bool, float, float] | None = None
    found = None
    for _, index in lives[max(0, place - 2) : place + 1]:
        each = allocations[index]
        distance = max(each.born - seen.time, seen.time - each.died, 0.0)
        rank = (each.size_bytes != seen.size_bytes, distance, -each.born)
        is_possible = distance <= clock_error and each.size_bytes >= seen.size_bytes
        if is_possible and (best is None or rank < best):
            best, found = rank, index
    return found
