"""The process that benchmarks/budgets.py starts: one model, trained as planned and as by hand.

    python _budgets.py CASE

Prints one line of JSON for each figure as soon as it is known; each plan goes to stderr. All loops
are the same code, a user's: loss, backward, the optimizer's step, zero_grad(). An arrangement is a
word for each block; one that runs out of memory, or above the budget, is no rival. Steps are timed
in turns, of the plan and of the rivals that were near it or faster at first, and then of the plan
and the fastest of those alone, which is what is compared. On a processor bytes are counted and
times mean nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import torch

import vramx
from benchmarks.models_budgets import SUBJECTS, Subject, build
from benchmarks.programs._plan import budgets_between, peak_of, report_words
from benchmarks.programs._report import SEED, Recorder, in_turn, report, sized, timed_ms
from benchmarks.programs._rivals import Arrangement, Known, rivals_of
from vramx.errors import NotInstalledError
from vramx.planning.blocks import Block, find_blocks
from vramx.planning.meters import meter_of
from vramx.planning.states import tensors_of
from vramx.planning.words import apply_words, chosen_words, words_for

BUDGETS, COMPARED = sized((5, 5), (2, 2), quick=(2, 1))  # and how many beside plans by hand
STEPS = sized(3, 2)  # of a loop whose peak is taken
# Of each that is near the plan: so many turns of so many steps; and so many of the last two.
TURNS, LAST_TURNS, TIMED = sized((3, 7, 3), (1, 1, 1), quick=(1, 2, 1))
MOST_UNSETTLED = sized(8, 1)  # of an arrangement: more than any took that settles at all
# Of one turn: how much slower than the plan a rival may be to be timed in turns with it; and how
# many of those are.
NEAR, MOST_NEAR = 1.04, sized(3, 3, quick=1)
RATE = 1e-5


class Training:
    """A model in a user's loop."""

    def __init__(self, subject: Subject) -> None:
        self.model, self.loss = subject
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.device = self.trained[0].device
        is_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.trained, lr=RATE, fused=is_gpu)

    def step(self) -> None:
        loss = self.loss(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int:
        meter = meter_of(self.device, self.model, tensors_of(self.optimizer.state))
        return peak_of(meter, self.step, STEPS)


def main(case: str) -> None:
    recorder = Recorder(deterministic=False)
    with torch.device("meta"):
        SUBJECTS[case](torch.device("meta"))  # its library is imported ahead of the turn
    device = recorder.begin()
    training = Training(build(case, device, SEED))
    start_s = time.perf_counter()
    fastest = vramx.plan(training.model, training.loss, optimizer=training.optimizer)
    report(f"{case} planning", "plan_s", "s", [time.perf_counter() - start_s])
    smallest = fastest.with_budget(training.loss, "smallest")
    budgets = budgets_between(smallest, fastest, BUDGETS)
    plans = [fastest.with_budget(training.loss, budget) for budget in budgets]
    for number, plan in enumerate(plans, 1):
        report_peak(f"{case} budget {number}", plan, training)
    hands = Hands(training)
    for number, plan in enumerate(plans[:COMPARED], 1):
        compare(f"{case} budget {number}", plan, hands)


def report_peak(case: str, plan: vramx.Plan, training: Training) -> None:
    """Report what the loop takes as planned."""
    print(case, plan, sep="\n", file=sys.stderr)
    assert plan.budget_bytes is not None
    report(case, "budget_bytes", "B", [plan.budget_bytes])
    report(case, "planned_bytes", "B", [plan.measured_bytes])
    if plan.before_bytes is not None:
        report(case, "before_bytes", "B", [plan.before_bytes])
    plan.apply()
    report(case, "peak_bytes", "B", [training.peak_bytes()])
    plan.undo()
    report_words(case, plan)


class Hands:
    """Arrangements of words for the blocks of a model, made and trained without a plan."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._blocks = find_blocks(training.model)
        self._known: dict[Arrangement, Known | None] = {}
        chosen = chosen_words(None)
        words = [words_for(block, training.device, chosen) for block in self._blocks]
        self.words = [{w for w in own if not w.endswith("offload")} for own in words]

    def of_plan(self, plan: vramx.Plan) -> Arrangement:
        return tuple(plan.words[block.name] for block in self._blocks)

    @contextmanager
    def applied(self, arrangement: Arrangement) -> Iterator[None]:
        words: Mapping[Block, str] = dict(zip(self._blocks, arrangement, strict=True))
        applied = apply_words(self.training.model, words)
        try:
            yield
        finally:
            applied.undo()

    def known(self, arrangement: Arrangement) -> Known | None:
        """Return the peak and the time of an arrangement; None: it ran out of memory."""
        if arrangement not in self._known:
            try:
                with self.applied(arrangement):
                    peak = self.training.peak_bytes()
                    steps_ms = self._timed_steps()
                    self._known[arrangement] = Known(peak, min(steps_ms))
            except torch.OutOfMemoryError:
                self._known[arrangement] = None
                self.training.optimizer.zero_grad()
        return self._known[arrangement]

    def turns_ms(self, arrangements: list[Arrangement], turns: int) -> list[list[float]]:
        """Return what the fastest step of each takes, in each turn.

        A busy host adds to a step and takes nothing away.
        """
        steps: dict[Arrangement, list[float]] = {each: [] for each in arrangements}
        for each in in_turn(steps, turns):
            with self.applied(each):
                self._settle()
                steps[each].append(min(self._timed_steps()))
        return [steps[each] for each in arrangements]

    def _settle(self) -> None:
        """Take steps until the allocator asks the driver for nothing in one.

        Where each block lies is found in the first steps of an arrangement, which take longer.
        """
        for _ in range(MOST_UNSETTLED):
            before = _driver_calls()
            self.training.step()
            if _driver_calls() == before:
                return

    def _timed_steps(self) -> list[float]:
        return [timed_ms(self.training.step)[0] for _ in range(TIMED)]


def _driver_calls() -> Any:
    with suppress(NotInstalledError):
        return vramx.allocator_stats().driver_calls
    return torch.cuda.memory_stats()["num_device_alloc"] if torch.cuda.is_available() else 0


def compare(case: str, plan: vramx.Plan, hands: Hands) -> None:
    """Report how the plan's step compares with the fastest of those made by hand that fit."""
    assert plan.budget_bytes is not None
    own = hands.of_plan(plan)
    known = hands.known(own)
    least_ms = float("inf") if known is None else known.step_ms
    rivals = rivals_of(own, hands.words, plan.budget_bytes, hands.known)
    fitting = {
        rival: found
        for rival in rivals
        if rival != own and (found := hands.known(rival)) is not None
        if found.peak_bytes <= plan.budget_bytes
    }
    near = [rival for rival, found in fitting.items() if found.step_ms <= least_ms * NEAR]
    near = sorted(near, key=lambda rival: fitting[rival].step_ms)[:MOST_NEAR]
    steps, *others = hands.turns_ms([own, *near], TURNS)
    report(case, "rivals", "1", [len(fitting)])
    ratio = 0.0
    if near:
        # Of several that are as fast, the one that was lucky is the best: so it is timed once more.
        best = min(zip(others, near, strict=True), key=lambda pair: min(pair[0]))[1]
        steps, rival_steps = hands.turns_ms([own, best], LAST_TURNS)
        # Turn by turn: what slows the machine for a while slows both.
        ratio = median(ms / rival_ms for ms, rival_ms in zip(steps, rival_steps, strict=True))
        print(f"{case}: {ratio:.3f} of {' '.join(best)}; planned {' '.join(own)}", file=sys.stderr)
    report(case, "step_ms", "ms", steps)
    report(case, "of_best_rival", "1", [ratio])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "llama")
