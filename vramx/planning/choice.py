"""The fastest arrangement of words whose predicted peak fits a budget.

Calls are taken in forward order. Of a beginning of an arrangement, only three things matter to the
rest: the bytes that it holds, its time, and whether its last call holds its own output; a beginning
with more bytes and more time than another is dropped. Every limit is one on the bytes of a
beginning, so nothing that could become the best is lost: the result is optimal for the model.
Where a word sits matters: one that recomputes has its peak on top of what earlier calls hold, and
so it goes first. Pure; costs calls x words x the beginnings on the front, milliseconds for a
model of equal blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vramx.planning.timeline import Place, Timeline


class _Beginning(NamedTuple):
    """Words of the first calls: the last of them, and the beginning that it follows."""

    held_bytes: int
    step_ms: float
    holds_output: bool
    word: str
    before: _Beginning | None


@dataclass(frozen=True)
class Arrangement:
    """A word for each call, and what the model predicts of them."""

    words: tuple[str, ...]
    peak_bytes: int
    step_ms: float


def fastest(timeline: Timeline, limit_bytes: float) -> Arrangement | None:
    """Return the fastest arrangement with a peak of at most `limit_bytes`; None: there is none.

    Of two that are equally fast, the one that holds less; a block that is called more than once has
    one word. With a larger limit the result is never slower.

    Example:
        >>> from vramx.planning.timeline import Cost
        >>> costs = {"keep": Cost(8, False, False, 8, 0, 1.0)}
        >>> costs["int8"] = Cost(4, False, False, 8, 0, 2.0)
        >>> fastest(Timeline([Place(0, costs), Place(1, costs)], [0, 0, 0]), 12).words
        ('int8', 'keep')
    """
    candidates = [_fastest(fixed, limit_bytes) for fixed in _with_shared_words(timeline)]
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=lambda each: (each.step_ms, each.peak_bytes), default=None)


def smallest(timeline: Timeline) -> Arrangement:
    """Return the arrangement with the smallest peak, and the fastest of those."""
    # Without times, one beginning is left of each kind: each question costs little.
    timeless = _timeless(timeline)
    low, high = -1, timeline.peak_bytes([next(iter(p.costs)) for p in timeline.places])
    while not fastest(timeless, high):
        high *= 2  # a first word that is no word of all calls of a block
    while high - low > 1:
        middle = (low + high) // 2
        if fastest(timeless, middle) is None:
            low = middle
        else:
            high = middle
    found = fastest(timeline, high)
    assert found is not None
    return found


def _timeless(timeline: Timeline) -> Timeline:
    places = [
        replace(p, costs={word: replace(cost, step_ms=0.0) for word, cost in p.costs.items()})
        for p in timeline.places
    ]
    return replace(timeline, places=places)


def _with_shared_words(timeline: Timeline) -> list[Timeline]:
    """Return the timeline once for each word of the blocks that are called more than once.

    All of them have the same word: such models have one such block, or few.
    """
    counts: dict[int, int] = {}
    for place in timeline.places:
        counts[place.block] = counts.get(place.block, 0) + 1
    shared = [place for place in timeline.places if counts[place.block] > 1]
    if not shared:
        return [timeline]
    words = [word for word in shared[0].costs if all(word in p.costs for p in shared)]
    return [
        replace(timeline, places=[_fixed(p, word, counts) for p in timeline.places])
        for word in words
    ]


def _fixed(place: Place, word: str, counts: dict[int, int]) -> Place:
    return replace(place, costs={word: place.costs[word]}) if counts[place.block] > 1 else place


def _fastest(timeline: Timeline, limit_bytes: float) -> Arrangement | None:
    if timeline.gaps[0] > limit_bytes:
        return None
    front = [_Beginning(0, 0.0, False, "", None)]
    for place, gap in zip(timeline.places, timeline.gaps[1:], strict=True):
        front = _front(_continued(front, place, limit_bytes, gap))
        if not front:
            return None
    words = _words(min(front, key=lambda each: (each.step_ms, each.held_bytes)))
    return Arrangement(words, timeline.peak_bytes(words), timeline.step_ms(words))


def _continued(
    front: Sequence[_Beginning], place: Place, limit_bytes: float, gap: int
) -> list[_Beginning]:
    """Return every beginning with every word behind it that fits."""
    found = []
    for word, cost in place.costs.items():
        for each in front:
            before = each.held_bytes
            held = before + place.kept(word, each.holds_output)
            if max(held + gap, place.own_peak(word, before, held)) <= limit_bytes:
                step_ms = each.step_ms + cost.step_ms
                found.append(_Beginning(held, step_ms, cost.holds_output, word, each))
    return found


def _front(beginnings: list[_Beginning]) -> list[_Beginning]:
    """Drop what another beginning is no worse than, in bytes and in time.

    Those that hold their output are apart: the next call's input is then free.
    """
    kept: list[_Beginning] = []
    least_ms = {False: float("inf"), True: float("inf")}
    for each in sorted(beginnings, key=lambda b: (b.held_bytes, b.step_ms)):
        # Sums of the same times in another order are equal but for rounding.
        if each.step_ms < least_ms[each.holds_output] * (1 - 1e-12):
            least_ms[each.holds_output] = each.step_ms
            kept.append(each)
    return kept


def _words(last: _Beginning) -> tuple[str, ...]:
    words = []
    each: _Beginning | None = last
    while each is not None and each.before is not None:
        words.append(each.word)
        each = each.before
    return tuple(reversed(words))
