"""Activation compression on models that nobody wrote for it: memory, time, gradients and losses.

Each case is a process of its own (benchmarks/programs/_activations.py), which has one GPU to itself
while the next ones import; in it, the ways of keeping activations alternate. A row is written as
soon as its process has ended, and one that fails is a row that says why. Takes about three minutes
on an H200 for everything.

The goals: most of what is saved is packed and gradients point where the exact ones do (a cosine of
0.999 at 8 bits); a transformer keeps 1.8 times fewer bytes, and one that is 4096 wide takes at most
1.08 times as long for it; a checkpoint keeps 0.52 of torch's bytes in 1.01 of its time; offload
as far as the link is free leaves 0.6 of the bytes on the device in 1.05 of the time; and the mean
loss after training is no farther above the exact one than seeds are from each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

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

DESCRIPTION = "activation compression on models of other libraries: memory, time, accuracy (GPU)"

CASES = (
    "llama",
    "llama_checkpoint",
    "llama_offload",
    "gpt2",
    "bert",
    "vit",
    "cnn",
    "unet3d",
    "gnn",
)
TRANSFORMERS = ("llama", "gpt2", "bert", "vit")
QUICK = ("llama",)
LIMIT_S = 120.0
COSINE_GOAL = 0.999
PACKED_GOAL = 0.5
# Of one way against another: metric, the most of it. Kept bytes first, then the time of a step.
RATIO_GOALS = {
    **{(f"{name} int8", f"{name} exact"): {"kept_bytes": 1 / 1.8} for name in TRANSFORMERS},
    ("llama int8", "llama exact"): {"kept_bytes": 1 / 1.8, "step_ms": 1.08},
    ("llama_checkpoint int8_inputs", "llama_checkpoint torch"): {
        "kept_per_block": 0.52,
        "step_ms": 1.01,
    },
    ("llama_offload int8_offload", "llama_offload int8"): {"kept_bytes": 0.6, "step_ms": 1.05},
}
# Of two seeds' losses, half differ by more than this many of their standard deviations.
SEED_DEVIATIONS = 0.95

Figures = dict[tuple[str, str], list[float]]  # by case ("llama int8") and metric


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
    figures, has_failed = measure(cases, starter(gpu, limit_s), writer)
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


def starter(gpu: str, limit_s: float) -> Callable[[str], Waiting]:
    script = PROGRAMS / "_activations.py"
    return lambda case: _launch.Started(
        Job(script, ALLOCATORS[0], (case,), gpu=gpu, limit_s=limit_s)
    )


def measure(
    cases: Iterable[str], start: Callable[[str], Waiting], writer: RowWriter
) -> tuple[Figures, bool]:
    """Give each case its turn; return all figures, and whether a process failed."""
    figures: Figures = {}
    has_failed = False
    for case, process in started_ahead(cases, start):
        outcome = process.take_turn(None, threading.Event())
        for name, measurements in by_case(outcome).items():
            writer.write(name, measurements)
            figures |= {(name, found.metric): found.values for found in measurements}
        if not outcome.is_ok:
            has_failed = True
            writer.write(case, [], outcome.status)
    return figures, has_failed


def by_case(outcome: Outcome) -> dict[str, list[Measurement]]:
    """Sort what a process printed; one that failed later has told what it had."""
    found: dict[str, list[Measurement]] = {}
    for line in outcome.reports:
        measurement = Measurement(line["metric"], line["unit"], line["values"])
        found.setdefault(line["case"], []).append(measurement)
    return found


def goals(figures: Figures) -> list[tuple[str, str, float, bool]]:
    """Return case, metric, value and whether the goal is met, for what was measured."""
    found = []
    for (case, metric), values in figures.items():
        if metric == "gradient_cosine" and "int8" in case:
            found.append((case, metric, values[0], values[0] >= COSINE_GOAL))
        if metric == "packed_share":
            found.append((case, metric, values[0], values[0] >= PACKED_GOAL))
        if metric == "loss_gap_same_seed":
            spread = figures[case.replace("int8", "exact"), "loss_seed_deviation"][0]
            gap = fmean(values)
            found.append((case, metric, gap, gap <= SEED_DEVIATIONS * spread))
    return [*found, *ratio_goals(figures)]


def ratio_goals(figures: Figures) -> Iterator[tuple[str, str, float, bool]]:
    """Yield the same for the goals that compare two ways."""
    for (case, baseline), most in RATIO_GOALS.items():
        for metric, goal in most.items():
            if (case, metric) in figures and (baseline, metric) in figures:
                ratio = median(figures[case, metric]) / median(figures[baseline, metric])
                yield case, metric, ratio, ratio <= goal


SHOWN = ("kept_bytes", "kept_ratio", "peak_bytes", "step_ms", "step_ratio", "gradient_cosine")


def table(figures: Figures) -> Table:
    """Lay the figures out, one line for each way of keeping the activations of a model."""
    from rich.table import Table

    from vramx.cli.bench import figure
    from vramx.sizes import format_size

    laid_out = Table(title="activations kept exactly and compressed")
    laid_out.add_column("case", no_wrap=True)
    for heading in (*SHOWN, "loss_trained", "goals"):
        laid_out.add_column(heading.replace("_", " "), justify="right")
    verdicts = goals(figures)
    for case in dict.fromkeys(case for case, _ in figures):
        cells = []
        for metric in (*SHOWN, "loss_trained"):
            values = figures.get((case, metric))
            middle = None if values is None else sorted(values)[len(values) // 2]
            is_size = metric.endswith("_bytes") and middle is not None
            cells.append(format_size(int(middle or 0)) if is_size else figure(middle))
        missed = [metric for name, metric, _, is_met in verdicts if name == case and not is_met]
        laid_out.add_row(case, *cells, f"MISSED {', '.join(missed)}" if missed else "")
    return laid_out
