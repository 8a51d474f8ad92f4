"""vramx.plan on models that nobody wrote for it: is a budget kept, and what does it cost.

Each case is a process of its own (benchmarks/programs/_plan.py), which plans one model for five
budgets between the smallest peak and the fastest step's, and runs each plan. A row is written as
soon as its process has ended, and one that fails is a row that says why. Takes about a minute on an
H200.

The goals: no peak exceeds its budget, each is within 5 % of what was predicted, and no step takes
longer than that of a smaller budget, but for what the clock's noise makes of equal steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.activations import Figures, measure
from benchmarks.harness import Options
from benchmarks.programs import _launch
from benchmarks.programs._launch import ALLOCATORS, PROGRAMS, Job, visible_gpus
from benchmarks.programs._rows import Request, RowWriter
from vramx.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "vramx.plan: peaks within budgets, near their prediction, and their steps' time (GPU)"

CASES = ("llama", "gpt2", "bert", "vit", "cnn")
QUICK = ("llama",)
LIMIT_S = 240.0
ERROR_GOAL = 0.05
# Medians of nine steps of the same work differ by about this much.
NOISE = 0.01


def run_all(
    options: Options, request: Request, writer: RowWriter
) -> tuple[list[Table | str], bool]:
    """Run the chosen cases; return what to show, and whether all ran and met their goals.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown case.
    """
    cases = chosen(request.only or (QUICK if options.quick else ()))
    gpu = visible_gpus(options.device, 1)[0]
    limit_s = request.limit_s or LIMIT_S

    def start(case: str) -> _launch.Waiting:
        job = Job(PROGRAMS / "_plan.py", ALLOCATORS[0], (case,), gpu=gpu, limit_s=limit_s)
        return _launch.Started(job)

    figures, has_failed = measure(cases, start, writer)
    is_good = not has_failed and all(is_met for *_, is_met in goals(figures))
    return [table(figures)], is_good


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the cases of these names, or all.

    Raises:
        InvalidValueError: a name is unknown.
    """
    for name in names:
        if name not in CASES:
            raise InvalidValueError(f"case {name!r} is unknown; accepted are {', '.join(CASES)}")
    return tuple(names) or CASES


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
    from rich.table import Table

    from vramx.cli.bench import figure
    from vramx.sizes import format_gib

    laid_out = Table(title="plans for budgets of bytes")
    laid_out.add_column("case", no_wrap=True)
    for heading in (*SHOWN, "blocks", "goals"):
        laid_out.add_column(heading.replace("_", " "), justify="right")
    verdicts = goals(figures)
    for case in dict.fromkeys(case for case, metric in figures if metric == "budget_bytes"):
        cells = []
        for metric in SHOWN:
            values = figures.get((case, metric))
            middle = median(values) if values else None
            is_size = metric.endswith("_bytes") and middle is not None
            cells.append(format_gib(middle or 0) if is_size else figure(middle))
        blocks = " ".join(
            f"{values[0]:.0f} {metric.removeprefix('blocks_')}"
            for (name, metric), values in figures.items()
            if name == case and metric.startswith("blocks_")
        )
        missed = [metric for name, metric, _, is_met in verdicts if name == case and not is_met]
        laid_out.add_row(case, *cells, blocks, f"MISSED {', '.join(missed)}" if missed else "")
    return laid_out
