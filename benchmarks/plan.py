"""vramx.plan on models that nobody wrote for it: is a budget kept, and what does it cost.

Each case is a process of its own (benchmarks/programs/_plan.py), which plans one model for five
budgets from the smallest possible to what the fastest step needs, and runs each plan. A row is
written as soon as its process has ended, and one that fails is a row that says why.

The goals: no peak exceeds its budget, each is within 5 % of what was predicted, and no step takes
longer than that of a smaller budget, but for what the clock's noise makes of equal steps. Steps are
taken in turns and compared turn by turn, so that a host that slows down slows both of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Options, Request, RowWriter
from benchmarks.programs._cases import Cases, Figures, Findings, Goal, cells, lay_out
from vramx.sizes import format_gib

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "vramx.plan: peaks within budgets, near their prediction, and their steps' time (GPU)"
SHARES = "preparation"

CASES = ("llama", "gpt2", "bert", "vit", "cnn")
PROCESSES = Cases("_plan.py", CASES, quick=("vit",), limit_s=240.0)
ERROR_GOAL = 0.05
# What the same work differs by, about.
NOISE = 0.01


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Plan the chosen models and run their plans, and judge the goals.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown case.
    """
    figures, has_failed = PROCESSES.measure(options, request, writer)
    is_good = not has_failed and all(is_met for *_, is_met in goals(figures))
    return [table(figures)], is_good


def goals(figures: Figures) -> list[Goal]:
    """Return case, metric, value and whether the goal is met, for what was measured."""
    found = []
    smaller: dict[str, list[list[float]]] = {}  # by model, the steps of the budgets so far
    for case, peak, steps_ms in _budgets(figures):
        ratio = peak / figures[case, "budget_bytes"][0]
        found.append((case, "peak_of_budget", ratio, ratio <= 1))
        ratio = peak / figures[case, "predicted_bytes"][0]
        found.append((case, "peak_of_prediction", ratio, abs(ratio - 1) <= ERROR_GOAL))
        timed = smaller.setdefault(case.split()[0], [])
        ratio = _turn_by_turn(steps_ms, timed)
        found.append((case, "step_of_smaller_budget", ratio, ratio <= 1 + NOISE))
        if not isnan(ratio):
            timed.append(steps_ms)
    return found


def _turn_by_turn(steps_ms: list[float], others: list[list[float]]) -> float:
    """Return the steps' ratio to those of the fastest of others; NaN, no ratio, if not timed."""
    if not steps_ms or any(map(isnan, steps_ms)):
        return float("nan")
    pairs = (zip(steps_ms, other, strict=True) for other in others)  # of one turn each
    return max((median(a / b for a, b in of_turns) for of_turns in pairs), default=0.0)


def _budgets(figures: Figures) -> Iterator[tuple[str, float, list[float]]]:
    """Yield the case of each budget, smaller ones first, with its peak and its steps."""
    for (case, metric), values in figures.items():
        if metric == "peak_bytes":
            yield case, values[0], figures.get((case, "step_ms"), [])


SHOWN = ("budget_bytes", "predicted_bytes", "peak_bytes", "predicted_ms", "step_ms")


def table(figures: Figures) -> Table:
    """Lay the figures out, one line for each budget."""
    lines = {
        case: [*cells(figures, case, SHOWN, size=format_gib), _blocks(figures, case)]
        for case, metric in figures
        if metric == "budget_bytes"
    }
    missed = [(case, metric) for case, metric, _, is_met in goals(figures) if not is_met]
    return lay_out("plans for budgets of bytes", (*SHOWN, "blocks"), lines, missed)


def _blocks(figures: Figures, case: str) -> str:
    """Say how many blocks a plan treats in which way."""
    return " ".join(
        f"{values[0]:.0f} {metric.removeprefix('blocks_')}"
        for (name, metric), values in figures.items()
        if name == case and metric.startswith("blocks_")
    )
