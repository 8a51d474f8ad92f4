"""Running a model with a word for each block, and finding the run that is best within a budget.

What is chosen for a budget is run; where the run exceeds it, or leaves room, the choice is made
again with that taken off. What should be nearly as fast is run, too, for predictions are off by
some percent; and what was about as fast is timed in turns (turns.py), for steps are off by more.
Processes that train together do all of it in step, and agree on each number. Not thread-safe; a run
costs some steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from vramx.nn.levels import LEFT
from vramx.planning.agreement import Agreement
from vramx.planning.blocks import Block
from vramx.planning.choice import Arrangement, fastest, near, predicted, smallest
from vramx.planning.device_memory import is_out_of_memory
from vramx.planning.isolated import free_garbage
from vramx.planning.loop import Measured as MeasuredLoop
from vramx.planning.measured import Measured, Run
from vramx.planning.meters import Meter
from vramx.planning.steps import Step
from vramx.planning.turns import Turns
from vramx.planning.words import apply_words
from vramx.progress import ProgressBar

# How often a choice is run and, if it does not fit or leaves room, made again.
_ROUNDS = 4
# Whose highest peak counts: where copies to the host are under way, steps differ a little.
_PEAK_STEPS = 2
# Of what was predicted, when it ran out of memory: by how much it exceeds is not known then.
_LESS_AFTER_OUT_OF_MEMORY = 0.95
# By how much of a step predictions are off, and one timing of it on a host that others disturb.
_PREDICTED_WITHIN, _TIMED_WITHIN = 0.04, 0.1
# How long running what is near takes, about, and timing it in turns: few, of a large model.
_MOST_MS, _MOST_TURNS = 8000.0, 12
# How many steps are timed when an arrangement is run, of how many; and in turns.
_TIMED, _STEPS = 3, 6
_TIMED_IN_TURNS, _STEPS_IN_TURNS = 2, 3


class Runner:
    """A step of a model in its loop, which runs as words for its blocks say."""

    def __init__(
        self, step: Step, meter: Meter, loop: MeasuredLoop, agreement: Agreement, bar: ProgressBar
    ) -> None:
        self._model = step.model
        self._step = step
        self._meter = meter
        self.loop = loop
        self._agreement = agreement
        self._bar = bar

    def peak_bytes(self, words: Mapping[Block, str]) -> int:
        """Return the peak of a step with these words, the largest of all processes."""
        phase = self._agreement.phase("in a step of the plan")
        with phase, apply_words(self._model, words):
            peak = self._peak_bytes()
        return int(self._agreement.most(peak))

    def _peak_bytes(self) -> int:
        with self._meter.watching():
            self._step()  # what is compiled or set up once is no cost of a step
            self._meter.settle()
            self._meter.reset_peak()
            for _ in range(_PEAK_STEPS):
                self._step()
            peak = self._meter.peak_bytes()
            self._meter.settle()
            return max(peak, self._meter.allocated_bytes() + self.loop.step_bytes)

    def _run(self, measured: Measured, found: Arrangement, error: int = 0) -> Run:
        """Run an arrangement once and for all; `error` is what predictions were too low by."""
        known = measured.runs.get(found.words)
        if known is not None:
            return known
        with self._agreement.phase("in a step as it should be"):
            peak, step_ms = self._measured_run(measured.words(found))
        failed = self._agreement.most(peak is None)
        peak, step_ms = int(self._agreement.most(peak or 0)), self._agreement.most(step_ms)
        known = Run(found, found.peak_bytes + error, None if failed else peak, step_ms)
        measured.runs[found.words] = known
        return known

    def _measured_run(self, words: Mapping[Block, str]) -> tuple[int | None, float]:
        """Return the peak and the time of a step; no peak: it ran out of memory."""
        try:
            with apply_words(self._model, words):
                return self._peak_bytes(), self._meter.time_ms(self._step, _TIMED)
        except RuntimeError as error:
            if self._agreement.is_shared or not is_out_of_memory(error):
                raise
        free_garbage()
        return None, float("inf")

    def fitting(self, measured: Measured, limit_bytes: float) -> Run:
        """Return the fastest run that was seen to fit; where none does, that of the least peak.

        What is run is what should be the fastest; of all that was run, for other limits too, the
        fastest is what was: where the two differ, the prediction is what is wrong.
        """
        bound = limit_bytes
        for number in range(_ROUNDS):
            self._bar.show("plan: running what should be the fastest", number, _ROUNDS)
            found = fastest(measured.timeline, bound)
            fitting = (run.arrangement.step_ms for run in measured.within(limit_bytes))
            if found is None or min(fitting, default=float("inf")) <= found.step_ms:
                break
            error = int(limit_bytes - bound) if limit_bytes < float("inf") else 0
            run = self._run(measured, found, error)
            bound = _corrected(bound, limit_bytes, run)
        self._run_as_it_is(measured, limit_bytes)
        if not measured.within(limit_bytes):
            return self.smallest(measured)
        self._run_near(measured, bound, limit_bytes)
        return self._fastest(measured, limit_bytes)

    def _run_as_it_is(self, measured: Measured, limit_bytes: float) -> None:
        """Run the blocks as they are, should that be faster, where such a step was seen to fit.

        Predicted is more than it takes where what blocks keep is gone before the peak, as of a
        block that is called without gradients, too.
        """
        peak = measured.before.peak_bytes
        if peak is None or peak > limit_bytes:
            return
        places = measured.timeline.places
        if all(LEFT in place.costs for place in places):
            found = predicted(measured.timeline, (LEFT,) * len(places))
            fitting = (run.arrangement.step_ms for run in measured.within(limit_bytes))
            if found.step_ms < min(fitting, default=float("inf")):
                self._run(measured, found)

    def _run_near(self, measured: Measured, bound: float, limit_bytes: float) -> None:
        """Run what should be nearly as fast as the fastest that fits, as long as there is time.

        Of processes that wait for each other none may run out of memory: they run nothing that
        should need more than what has run.
        """
        fitting = [run.arrangement for run in measured.within(limit_bytes)]
        if self._agreement.is_shared:
            bound = min(bound, max(each.peak_bytes for each in fitting))
        least_ms = min(each.step_ms for each in fitting)
        left_ms = _MOST_MS
        for each in near(measured.timeline, bound, (1 + _PREDICTED_WITHIN) * least_ms):
            if left_ms <= 0:
                return
            if each.words not in measured.runs:
                self._bar.show("plan: running what should be nearly as fast", 0, 1)
                left_ms -= _STEPS * min(self._run(measured, each).measured_ms, _MOST_MS)

    def _fastest(self, measured: Measured, limit_bytes: float) -> Run:
        """Return the fastest that fits; what was about as fast, or should be, is timed in turns.

        What should be, too: by a single timing a busy host made it slow.
        """
        fitting = measured.within(limit_bytes)
        least_ms = min(run.measured_ms for run in fitting)
        predicted_ms = (1 + _PREDICTED_WITHIN) * min(run.arrangement.step_ms for run in fitting)
        close = {
            run.arrangement.words: run
            for run in fitting
            if run.measured_ms <= (1 + _TIMED_WITHIN) * least_ms
            or run.arrangement.step_ms <= predicted_ms
        }
        turns, left_ms = Turns(list(close)), _MOST_MS
        times = {words: [run.measured_ms] for words, run in close.items()}
        for turn in range(_MOST_TURNS):
            if len(turns.left) == 1 or left_ms <= 0:
                break
            self._bar.show("plan: timing what was nearly as fast", turn, _MOST_TURNS)
            added = {words: self._time_ms(measured, close[words]) for words in turns.order}
            turns.add(added)
            for words, step_ms in added.items():
                times[words].append(step_ms)
            left_ms -= _STEPS_IN_TURNS * sum(added.values())
        best = turns.best()
        best_ms = sorted(times[best])[len(times[best]) // 4]
        for words, run in close.items():
            run.measured_ms = best_ms * max(1.0, turns.ratio(words, best))
        return close[best]

    def _time_ms(self, measured: Measured, run: Run) -> float:
        with (
            self._agreement.phase("in a step as it should be"),
            apply_words(self._model, measured.words(run.arrangement)),
        ):
            self._step()  # where its memory lies is found in the first
            step_ms = self._meter.time_ms(self._step, _TIMED_IN_TURNS)
        return self._agreement.most(step_ms)

    def smallest(self, measured: Measured) -> Run:
        """Return the run of the arrangement with the smallest peak."""
        return self._run(measured, smallest(measured.timeline))


def _corrected(bound: float, limit_bytes: float, run: Run) -> float:
    """Return the bound on predictions under which what is chosen next should fit the limit."""
    predicted = run.arrangement.peak_bytes
    if run.measured_bytes is None:
        return _LESS_AFTER_OUT_OF_MEMORY * min(bound, predicted)
    corrected = limit_bytes - (run.measured_bytes - predicted)
    return min(corrected, predicted - 1) if run.measured_bytes > limit_bytes else corrected
