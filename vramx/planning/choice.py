"""The fastest arrangement of words whose predicted peak fits a budget.

Calls are taken in forward order. Of a beginning of an arrangement, only three things matter to the
rest: the bytes that it holds, its time, and whether its last call holds its own output; a beginning
with more bytes than another, and as much time or more, is dropped. Every limit is one on the bytes
of a beginning, so nothing that could become the best is lost, but for 0.01 % of its time a call.

That finds what is best for the device, or for the host. Where the other is then not busier, it is
optimal. Where it is, both times, weights are found for which two arrangements, one with a busier
host, are as good (Lagrangian relaxation), and the two are mixed: in tests that is slower than the
best by less than what the word of one call changes. Where a word sits matters: one that recomputes
has its peak on top of what earlier calls hold, and so it goes first. Pure; costs calls x words x
the beginnings on the front, milliseconds for a model of equal blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vramx.planning.timeline import Place, Timeline

# Sums of the same times in another order are equal but for this share.
_ROUNDING = 1e-12
# Beginnings whose times differ by less are one: no timing is that exact. Of eighty calls that all
# differ the choice was slower by 0.02 % for it, and was made in a tenth of the time.
_ALIKE = 1e-4


class _Beginning(NamedTuple):
    """Words of the first calls: the last of them, and the beginning that it follows.

    `time_ms` is the host's and the device's, weighted.
    """

    held_bytes: int
    time_ms: float
    holds_output: bool
    word: str
    before: _Beginning | None


@dataclass(frozen=True)
class Arrangement:
    """A word for each call, and what the model predicts of them; busy times are of the calls."""

    words: tuple[str, ...]
    peak_bytes: int
    step_ms: float
    host_ms: float
    device_ms: float

    def weighted_ms(self, weight: float) -> float:
        return _weighted(weight, self.host_ms, self.device_ms)


def fastest(timeline: Timeline, limit_bytes: float) -> Arrangement | None:
    """Return the fastest arrangement with a peak of at most `limit_bytes`; None: there is none.

    Of two that are equally fast, the one that holds less; a block that is called more than once has
    one word. With a larger limit the result is never slower where it is optimal.

    Example:
        >>> from vramx.planning.timeline import Cost
        >>> costs = {"keep": Cost(8, False, False, 8, 0, 1.0, 0.0)}
        >>> costs["int8"] = Cost(4, False, False, 8, 0, 2.0, 0.0)
        >>> fastest(Timeline([Place(0, costs), Place(1, costs)], [0, 0, 0]), 12).words
        ('int8', 'keep')
    """
    candidates = [_balanced(fixed, limit_bytes) for fixed in _with_shared_words(timeline)]
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=_order, default=None)


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


def near(timeline: Timeline, limit_bytes: float, most_ms: float) -> list[Arrangement]:
    """Return arrangements that fit and should take no longer than that, the fastest first.

    Each has one word or two, or as few where a block has neither of them: so each is of another
    kind, and what is predicted wrongly of one word is not wrong in all of them.
    """
    every = sorted({word for place in timeline.places for word in place.costs})
    few = (itertools.combinations(every, count) for count in (1, 2))
    chosen = itertools.chain.from_iterable(few)
    found = (fastest(_with_words(timeline, words), limit_bytes) for words in chosen)
    alike = {each.words: each for each in found if each is not None and each.step_ms <= most_ms}
    return sorted(alike.values(), key=_order)


def _with_words(timeline: Timeline, words: Collection[str]) -> Timeline:
    """Return the timeline with no other words for blocks that can have one of these."""
    places = [
        replace(place, costs=own)
        if (own := {w: place.costs[w] for w in words if w in place.costs})
        else place
        for place in timeline.places
    ]
    return replace(timeline, places=places)


def _timeless(timeline: Timeline) -> Timeline:
    places = [
        replace(p, costs={w: replace(c, host_ms=0.0, device_ms=0.0) for w, c in p.costs.items()})
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


def _balanced(timeline: Timeline, limit_bytes: float) -> Arrangement | None:
    """Return the arrangement under which the busier one of host and device is the least busy.

    Each turn weighs the two such that an arrangement with a busier host and one with a busier
    device are equal, and replaces one of them by what is better than both, until nothing is.
    """
    by_device = _least(timeline, limit_bytes, 0.0)
    if by_device is None or by_device.host_ms <= by_device.device_ms:
        return by_device
    by_host = _least(timeline, limit_bytes, 1.0)
    if by_host is None or by_host.device_ms <= by_host.host_ms:
        return by_host
    slow_host, slow_device = by_device, by_host
    while True:
        excess_ms = slow_host.host_ms - slow_host.device_ms
        excess_ms += slow_device.device_ms - slow_device.host_ms
        added_ms = slow_device.device_ms - slow_host.device_ms
        weight = min(max(added_ms / excess_ms, 0.0), 1.0)
        found = _least(timeline, limit_bytes, weight)
        assert found is not None  # what fits does so at any weight
        if found.weighted_ms(weight) >= slow_host.weighted_ms(weight) * (1 - _ROUNDING):
            return _mixed(timeline, limit_bytes, slow_host.words, slow_device.words)
        if found.host_ms > found.device_ms:
            slow_host = found
        else:
            slow_device = found


def _mixed(
    timeline: Timeline, limit_bytes: float, some: tuple[str, ...], others: tuple[str, ...]
) -> Arrangement:
    """Return the best that has the first words of one arrangement and the last of another."""
    mixtures = []
    for count in range(len(some) + 1):
        mixtures += [some[:count] + others[count:], others[:count] + some[count:]]
    candidates = (predicted(timeline, words) for words in mixtures)
    return min((each for each in candidates if each.peak_bytes <= limit_bytes), key=_order)


def predicted(timeline: Timeline, words: tuple[str, ...]) -> Arrangement:
    """Return an arrangement of these words, a word for each call."""
    peak_bytes, step_ms = timeline.peak_bytes(words), timeline.step_ms(words)
    return Arrangement(words, peak_bytes, step_ms, *timeline.busy_ms(words))


def _order(arrangement: Arrangement) -> tuple[float, int]:
    return arrangement.step_ms, arrangement.peak_bytes


def _weighted(weight: float, host_ms: float, device_ms: float) -> float:
    return weight * host_ms + (1 - weight) * device_ms


def _least(timeline: Timeline, limit_bytes: float, weight: float) -> Arrangement | None:
    """Return the arrangement with the smallest weighted time; the weight is the host's."""
    if timeline.gaps[0] > limit_bytes:
        return None
    front = [_Beginning(0, 0.0, False, "", None)]
    for place, gap in zip(timeline.places, timeline.gaps[1:], strict=True):
        front = _front(_continued(front, place, limit_bytes, gap, weight))
        if not front:
            return None
    words = _words(min(front, key=lambda each: (each.time_ms, each.held_bytes)))
    return predicted(timeline, words)


def _continued(
    front: Sequence[_Beginning], place: Place, limit_bytes: float, gap: int, weight: float
) -> list[_Beginning]:
    """Return every beginning with every word behind it that fits."""
    found = []
    for word, cost in place.costs.items():
        for each in front:
            before = each.held_bytes
            held = before + place.kept(word, each.holds_output)
            if max(held + gap, place.own_peak(word, before, held)) <= limit_bytes:
                time_ms = each.time_ms + _weighted(weight, cost.host_ms, cost.device_ms)
                found.append(_Beginning(held, time_ms, cost.holds_output, word, each))
    return found


def _front(beginnings: list[_Beginning]) -> list[_Beginning]:
    """Drop what another beginning is no worse than, in bytes and in time.

    Those that hold their output are apart: the next call's input is then free.
    """
    kept: list[_Beginning] = []
    least_ms = {False: float("inf"), True: float("inf")}
    for each in sorted(beginnings, key=lambda b: (b.held_bytes, b.time_ms)):
        if each.time_ms < least_ms[each.holds_output] * (1 - _ALIKE):
            least_ms[each.holds_output] = each.time_ms
            kept.append(each)
    return kept


def _words(last: _Beginning) -> tuple[str, ...]:
    words = []
    each: _Beginning | None = last
    while each is not None and each.before is not None:
        words.append(each.word)
        each = each.before
    return tuple(reversed(words))
