"""What a picture says of a run beside its lines: failures, the limit, pauses, what memory was for.

Pure functions of a recording. Times are microseconds from its first event. A pass over the events
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vramx.memory.explain import recorded_capacity
from vramx.memory.replay import ReplayResult
from vramx.memory.snapshot import Snapshot
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, Trace
from vramx.sizes import format_gib, format_size

_SHARE_OF_PAUSE = 0.02  # of the run, from which on a stretch without events is one
_INTERVALS_OF_PAUSE = 50  # and of the mean time between events, so that a short trace is none
_MOST_PAUSES = 40
_OTHER = "(not recorded)"


@dataclass(frozen=True)
class Mark:
    """A moment, or a height in bytes, with its words."""

    at: float
    text: str


@dataclass(frozen=True)
class Pause:
    """A stretch of time in which nothing was allocated or freed."""

    begin_us: int
    end_us: int


@dataclass(frozen=True, eq=False)
class Layer:
    """The live bytes of one category over time; layers add up to what is live."""

    name: str
    time_us: npt.NDArray[np.int64]
    live_bytes: npt.NDArray[np.int64]


def failures_in(trace: Trace) -> tuple[Mark, ...]:
    """Return when requests failed, and what they asked for."""
    rows = np.flatnonzero((trace.op == ALLOCATE) & np.isin(trace.id, trace.failed))
    return tuple(
        Mark(int(trace.time_us[row]), f"out of memory: {format_size(int(trace.size[row]))} asked")
        for row in rows
    )


def limit_of(snapshot: Snapshot | None, given_bytes: int) -> Mark | None:
    """Return what the allocator could hold: as given, else as far as the recording tells."""
    if given_bytes:
        return Mark(given_bytes, f"capacity {format_gib(given_bytes)}, as given")
    if snapshot is None or not snapshot.failures:
        return None
    found = recorded_capacity(snapshot, snapshot.failures[-1])
    if found is None:
        return None
    if found.source == "device":
        return Mark(found.low_bytes, f"capacity {format_gib(found.low_bytes)}")
    between = f"{format_gib(found.low_bytes)} and {format_gib(found.high_bytes)}"
    return Mark(found.low_bytes, f"capacity between {between}")


def pauses_in(trace: Trace) -> tuple[Pause, ...]:
    """Return the long stretches of time without an event, in order; the longest where many are."""
    times = trace.time_us.astype(np.int64)
    span_us = int(times[-1] - times[0])
    waits = np.diff(times)
    least = span_us * max(_SHARE_OF_PAUSE, _INTERVALS_OF_PAUSE / len(times))
    found = np.flatnonzero(waits >= max(least, 1))
    longest = found[np.argsort(-waits[found], kind="stable")][:_MOST_PAUSES]
    return tuple(Pause(int(times[row]), int(times[row + 1])) for row in np.sort(longest))


def layers_of(snapshot: Snapshot | None, samples: int) -> tuple[Layer, ...]:
    """Return what was live by category, none where the file says nothing of categories.

    Each of the samples is the moment of its stretch of events at which the most was live.
    """
    if snapshot is None or not snapshot.has_categories:
        return ()
    categories = snapshot.allocations.category
    return category_layers(snapshot.trace, categories, snapshot.categories, samples)


def category_layers(
    trace: Trace, categories: npt.NDArray[np.int64], names: Sequence[str], samples: int
) -> tuple[Layer, ...]:
    """Return the live bytes of each category that has any.

    Args:
        categories: of each allocation, by its id: a number in `names`.
        names: of categories; "" is what nothing is said of.
    """
    sign = np.where(trace.op == ALLOCATE, 1, np.where(trace.op == FREE_COMPLETED, -1, 0))
    change = sign * trace.size.astype(np.int64)
    change[np.isin(trace.id, trace.failed)] = 0
    rows = _highest_rows(change.cumsum(), samples)
    kind = categories[trace.id]
    layers = []
    for number, name in enumerate(names):
        live = np.where(kind == number, change, 0).cumsum()[rows]
        if live.any():
            layers.append(Layer(name or _OTHER, trace.time_us[rows].astype(np.int64), live))
    return tuple(layers)


def _highest_rows(live: npt.NDArray[np.int64], samples: int) -> npt.NDArray[np.int64]:
    """Return, of equally long stretches of rows, the row of each at which the most is live."""
    count = min(samples, len(live))
    bounds = np.linspace(0, len(live), count + 1).astype(int)
    return np.array([begin + live[begin:end].argmax() for begin, end in pairwise(bounds)], np.int64)


def unused_share(result: ReplayResult) -> Any:
    """Return over a timeline the percentage of what was held that was in no tensor."""
    assert result.timeline is not None
    live = result.timeline.live_bytes.astype(np.float64)
    held = result.timeline.reserved_bytes.astype(np.float64)
    return 100 * (1 - np.divide(live, held, out=np.ones_like(live), where=held > 0)).clip(0)
