"""vramx.plan on models that nobody wrote for it: is a budget kept, and what does it cost.

Each case is a process of its own (benchmarks/programs/_plan.py), which plans one model for five
budgets from the smallest possible to what the fastest step needs, and runs each plan. A row is
written as soon as its process has ended, and one that fails is a row that says why.

The goals: no peak exceeds its budget, each is within 5 % of what was predicted, and no step takes
longer than that of a smaller budget, but for what the clock's noise makes of equal steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Options
from benchmarks.programs._cases import Cases, Figures, Findings, cells, lay_out
from benchmarks.programs._rows import Request, RowWriter
from vramx.sizes import format_gib

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "vramx.plan: peaks within budgets, near their prediction, and their steps' time (GPU)"

CASES = ("llama", "gpt2", "bert", "vit", "cnn")
PROCESSES = Cases("_plan.py", CASES, quick=("llama",), limit_s=240.0)
ERROR_GOAL = 0.05
# Medians of the same work differ by about this much.
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


def goals(figures: Figures) -> list[tuple[str, str, float, bool]]:
    """Return case, metric, value and whether the goal is met, for what was measured."""
    found = []
    before: dict[str, float] = {}
    for case, peak, step_ms in _budgets(figures):
        ratio = peak / figures[case, "budget_bytes"][0]
        found.append((case, "peak_of_budget", ratio, ratio <= 1))
        ratio = peak / figures[case, "predicted_bytes"][0]
        found.append((case, "peak_of_prediction", ratio, abs(ratio - 1) <= ERROR_GOAL))
        model = case.split()[0]
        ratio = step_ms / before.get(model, float("inf"))
        found.append((case, "step_of_smaller_budget", ratio, ratio <= 1 + NOISE))
        before[model] = min(step_ms, before.get(model, step_ms))
    return found


def _budgets(figures: Figures) -> Iterator[tuple[str, float, float]]:
    """Yield the case of each budget, smaller ones first, with its peak and its median step."""
    for (case, metric), values in figures.items():
        if metric == "peak_bytes":
            yield case, values[0], median(figures.get((case, "step_ms"), [float("nan")]))


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
