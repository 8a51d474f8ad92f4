"""From what was measured to the timeline: levels, gaps and times of a step less those of its calls.

The step was measured with every block under the word that needs least. What calls held in it is
known from their costs, so that what is left is of the rest of the model; for the arrangement that
was measured, the timeline's prediction is the measurement. Pure; linear in the number of marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vramx.planning.timeline import Cost, Place, Timeline
from vramx.planning.trace import Call, Event, Trace


def assemble(
    trace: Trace, costs: Sequence[Mapping[str, Cost]], words: Sequence[str], step_ms: float
) -> Timeline:
    """Return the timeline of a step that was traced, given costs and the word of each call."""
    places = _places(trace.calls, costs, words)
    held, holds = [0], False
    for place, word in zip(places, words, strict=True):
        held.append(held[-1] + place.kept(word, holds))
        holds = place.costs[word].holds_output
    peaks = _Peaks(trace, held)
    places = [
        replace(
            place,
            forward_level=peaks.forward[i] - place.costs[word].forward_bytes,
            backward_level=peaks.backward[i] - place.costs[word].backward_bytes,
        )
        for i, (place, word) in enumerate(zip(places, words, strict=True))
    ]
    calls = Timeline(places, peaks.gaps)
    # Times of calls made alone may exceed those within a step, where little is outside of them.
    return replace(calls, outside_ms=max(0.0, step_ms - calls.step_ms(words)))


def _places(
    calls: Sequence[Call], costs: Sequence[Mapping[str, Cost]], words: Sequence[str]
) -> list[Place]:
    """Return places without levels. A border that stays though no block holds it costs nothing."""
    places = []
    for i, call in enumerate(calls):
        own = costs[i][words[i]]
        before_holds = call.linked and costs[i - 1][words[i - 1]].holds_output
        follows = i + 1 < len(calls) and calls[i + 1].linked
        next_holds = follows and costs[i + 1][words[i + 1]].holds_input
        free_input = call.input_stays and not (own.holds_input or before_holds)
        free_output = call.output_stays and not (own.holds_output or next_holds)
        places.append(
            Place(
                block=call.block,
                costs=costs[i],
                input_bytes=0 if free_input else call.input_bytes,
                output_bytes=0 if free_output else call.output_bytes,
                late_input_bytes=_late(call.input_bytes, free_input, call.input_is_late),
                late_output_bytes=_late(call.output_bytes, free_output, call.output_is_late),
                linked=call.linked,
            )
        )
    return places


def _late(nbytes: int, is_free: bool, is_late: bool) -> int:
    return nbytes if is_free and not is_late else 0


class _Peaks:
    """The peaks within each call and in the gaps between, less what calls hold.

    Args:
        held: bytes that the first calls hold, by their number.
    """

    def __init__(self, trace: Trace, held: Sequence[int]) -> None:
        count = len(trace.calls)
        self._held = held
        self._alive: set[int] = set()
        self._current: int | None = None  # the call that runs, forward or backward
        self._learns = {m.call for m in trace.marks if m.event is Event.BACKWARD_BEGIN}
        self._linked = [call.linked for call in trace.calls]
        floor = min(mark.level for mark in trace.marks) - held[-1]
        self.forward, self.backward = [floor] * count, [floor] * count
        self.gaps = [floor] * (count + 1)
        for mark in trace.marks[:-1]:
            self._enter(mark.event, mark.call)
            self._note(mark.peak)

    def _enter(self, event: Event, call: int) -> None:
        if event is Event.FORWARD_BEGIN:
            self._current = call
        elif event is Event.FORWARD_END:
            self._current = None
            self._alive |= {call} & self._learns
        elif event is Event.BACKWARD_BEGIN:
            self._current = call
            if call + 1 < len(self._linked) and self._linked[call + 1]:
                self._alive.discard(call + 1)  # its end is this moment, told a little later
        elif event is Event.BACKWARD_END:
            self._alive.discard(call)
            self._current = None if self._current == call else self._current

    def _note(self, peak: int) -> None:
        count = max(self._alive, default=-1) + 1
        bare, call = peak - self._held[count], self._current
        if call is None:
            self.gaps[count] = max(self.gaps[count], bare)
        elif call in self._alive:
            # What later calls hold on a branch beside this one counts, too.
            self.backward[call] = max(self.backward[call], peak - self._held[call + 1])
        else:
            self.forward[call] = max(self.forward[call], bare)
