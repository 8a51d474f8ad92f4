"""Swapped blocks against other ways to keep less: bytes, peak, time and gradients of whole stacks.

Each case is a model and a process of its own (benchmarks/programs/_fused.py); in it the ways take
steps in turn: eager, vramx.optimize at each level, torch's checkpoints, torch.compile with and
without a memory budget, and Liger where it is installed. A way that cannot run is a row that says
why. `python -m benchmarks.plot benchmarks/results/fused.csv` draws bytes against time. The Llama
stack takes under 150 s on an H200, the others a minute each.

The goals, on the Llama stack, in bytes per token and hidden unit that a block keeps: int8 at most
13.5 in 1.03 of Liger's time and less than eager's; recompute_mlp 6.5 in 1.17 of Liger's;
recompute_all 1.1 in the time of Liger with checkpoints. Gradients of 8 bits, of recomputation and
of exact kernels have a cosine of 0.999 with eager's in every case, or lie no more than twice as far
from eager's as those of Liger or of torch.compile, which round at other places than eager does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.activations import Figures, by_case
from benchmarks.harness import Measurement, Options
from benchmarks.programs import _launch
from benchmarks.programs._launch import (
    ALLOCATORS,
    PROGRAMS,
    Job,
    Outcome,
    Waiting,
    started_ahead,
    visible_gpus,
)
from benchmarks.programs._rows import Request, RowWriter
from vramx.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "swapped blocks against Liger, checkpoints and torch.compile: memory, time (GPU)"

CASES = ("llama", "gpt2", "vit", "convnext", "cnn")
QUICK = ("llama",)
LIMIT_S = 300.0
COSINE_GOAL = 0.999
OURS = ("keep", "int8", "int8_nearest", "int4", "recompute_mlp", "recompute_all")
FAITHFUL = tuple(way for way in OURS if way != "int4")  # what rounds no more than 8 bits do
EXACT = ("liger", "compile")
BLOCK = "block_kept_per_token_hidden"


class Goal(NamedTuple):
    """A figure and the most it may be; of a baseline's where there is one."""

    case: str
    metric: str
    most: float
    baseline: str | None = None


GOALS = (
    Goal("llama int8", BLOCK, 13.5),
    Goal("llama int8", "step_ms", 1.03, "llama liger"),
    Goal("llama int8", "step_ms", 1.0, "llama eager"),
    Goal("llama recompute_mlp", BLOCK, 6.5),
    Goal("llama recompute_mlp", "step_ms", 1.17, "llama liger"),
    Goal("llama recompute_all", BLOCK, 1.1),
    Goal("llama recompute_all", "step_ms", 1.0, "llama liger_checkpoint"),
)


class Verdict(NamedTuple):
    """What was measured for a goal; no values where it could not be."""

    goal: Goal
    values: list[float]
    is_met: bool


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
    figures, has_failed = measure(cases, starter(gpu, request.limit_s or LIMIT_S), writer)
    verdicts = judge(figures)
    write_ratios(verdicts, writer)
    is_good = not has_failed and all(found.is_met for found in verdicts)
    return [table(figures, verdicts), *summary(verdicts)], is_good


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the cases of these names, or all.

    Raises:
        InvalidValueError: a name is unknown.
    """
    for name in names:
        if name not in CASES:
            raise InvalidValueError(f"case {name!r} is unknown; accepted are {', '.join(CASES)}")
    return tuple(names) or CASES


def starter(gpu: str, limit_s: float) -> Callable[[str], Waiting]:
    script = PROGRAMS / "_fused.py"
    return lambda case: _launch.Started(
        Job(script, ALLOCATORS[0], (case,), gpu=gpu, limit_s=limit_s)
    )


def measure(
    cases: Iterable[str], start: Callable[[str], Waiting], writer: RowWriter
) -> tuple[Figures, bool]:
    """Give each case its turn; return all figures, and whether anything failed.

    What was skipped, with its reason, has not failed.
    """
    figures: Figures = {}
    has_failed = False
    for case, process in started_ahead(cases, start):
        outcome = process.take_turn(None, threading.Event())
        statuses = {line["case"]: line["status"] for line in outcome.reports if "status" in line}
        if not outcome.is_ok:
            statuses[case] = outcome.status
        for name, measurements in by_case(figures_of(outcome)).items():
            writer.write(name, measurements)
            figures |= {(name, found.metric): found.values for found in measurements}
        for name, status in statuses.items():
            writer.write(name, [], status)
            has_failed |= status.startswith("failed")
    return figures, has_failed


def figures_of(outcome: Outcome) -> Outcome:
    """Return an outcome without the lines that say what became of a way."""
    lines = tuple(line for line in outcome.reports if "status" not in line)
    return Outcome(outcome.status, lines, outcome.wall_s)


def judge(figures: Figures) -> list[Verdict]:
    """Return what became of each goal of the cases that were run; not measured is not met."""
    cases = {case.split()[0] for case, _ in figures}
    verdicts = [_verdict(goal, figures) for goal in GOALS if goal.case.split()[0] in cases]
    for (case, metric), values in figures.items():
        model, way = case.split()
        if metric == "gradient_cosine" and way in FAITHFUL:
            least = _least_cosine(model, figures)
            verdicts.append(Verdict(Goal(case, metric, least), values, values[0] >= least))
    return verdicts


def _least_cosine(model: str, figures: Figures) -> float:
    """Return the cosine that gradients must have, for how far exact ones are from eager's."""
    found = [figures.get((f"{model} {way}", "gradient_cosine"), []) for way in EXACT]
    known = [values[0] for values in found if values]
    # The distance of two directions goes with the root of 1 - cosine.
    return min(COSINE_GOAL, 1 - 2**2 * (1 - max(known, default=1.0)))


def _verdict(goal: Goal, figures: Figures) -> Verdict:
    values = figures.get((goal.case, goal.metric), [])
    if goal.baseline is not None:
        theirs = figures.get((goal.baseline, goal.metric), [])
        # Round by round, for the ways took turns; nothing where one of the two was not measured.
        values = [a / b for a, b in zip(values, theirs, strict=False)]
    return Verdict(goal, values, bool(values) and median(values) <= goal.most)


def write_ratios(verdicts: Sequence[Verdict], writer: RowWriter) -> None:
    """Write the ratios of the goals that compare two ways, one value a round."""
    for goal, values, _ in verdicts:
        if goal.baseline is not None and values:
            name = f"{goal.case} against {goal.baseline.split()[1]}"
            ratio = Measurement("step_ratio", "1", values)
            writer.write(name, [ratio, Measurement("goal", "1", [goal.most])])


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """Say what became of each goal, a line each."""
    lines = []
    for goal, values, is_met in verdicts:
        figure = f"{median(values):.4g}" if values else "not measured"
        bound = (
            f"at least {goal.most:.4g}" if goal.metric == "gradient_cosine" else f"<= {goal.most}"
        )
        against = f" against {goal.baseline.split()[1]}" if goal.baseline else ""
        mark = "ok    " if is_met else "MISSED"
        lines.append(f"{mark} {goal.case}{against}: {goal.metric} {figure} ({bound})")
    return lines


SHOWN = (BLOCK, "kept_bytes", "peak_bytes", "step_ms", "step_ratio", "host_ms", "gradient_cosine")


def table(figures: Figures, verdicts: Sequence[Verdict]) -> Table:
    """Lay the figures out, one line for each way of a model."""
    from rich.table import Table

    from vramx.cli.bench import figure
    from vramx.sizes import format_size

    laid_out = Table(title="blocks and stacks, all ways in one process")
    laid_out.add_column("case", no_wrap=True)
    for heading in (*SHOWN, "goals"):
        laid_out.add_column(heading.replace("_", " "), justify="right")
    for case in dict.fromkeys(case for case, _ in figures):
        cells = []
        for metric in SHOWN:
            values = figures.get((case, metric))
            middle = None if values is None else median(values)
            is_size = metric in ("kept_bytes", "peak_bytes") and middle is not None
            cells.append(format_size(int(middle or 0)) if is_size else figure(middle))
        missed = [goal.metric for goal, _, is_met in verdicts if goal.case == case and not is_met]
        laid_out.add_row(case, *cells, f"MISSED {', '.join(missed)}" if missed else "")
    return laid_out
