"""Programs of several streams under native, expandable_segments and vramx: time and memory.

Each case (benchmarks/programs/_streams.py) is a process under each allocator; they share a GPU and
take a round after the other, so that what slows the machine slows all of them. Each round tells the
seconds with buffers that come and go, with buffers that were there before, and with all on one
stream. The goals: vramx takes no more than 1.05 of the time of torch's faster allocator, and
reserves no more than the more frugal of the two, but where the host runs away from the GPU: there
whose host is slower reserves less. A run takes about 5 minutes on an H100, a quick one less than a
minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Measurement, Options, Request, RowWriter
from benchmarks.programs import _cases
from benchmarks.programs._cases import (
    Figures,
    Findings,
    Verdict,
    cells,
    lay_out,
    lines_of,
    names_in,
)
from benchmarks.programs._launch import (
    ALLOCATORS,
    PROGRAMS,
    Allocator,
    Job,
    Outcome,
    Started,
    Together,
    in_batches,
    visible_gpus,
)

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "programs of several streams, by allocator: time, overlap, memory (GPU)"

CASES = ("prefetch", "runaway", "offload", "optimizer_states", "four_streams", "small_job")
QUICK = ("prefetch",)
CHILD = PROGRAMS / "_streams.py"
REPEATS = 7
LIMIT_S = 180.0
# The most that a metric may be, in what the better of torch's allocators has.
GOALS = {"seconds": 1.05, "peak_reserved_bytes": 1.0}
# In these it is not asked how much is reserved.
TIMED_ONLY = ("runaway",)
OURS = "vramx"
BATCH = 2  # cases whose processes import at once
# By their names in a report.
METRICS = {
    "fresh": ("seconds", "s"),
    "kept": ("seconds_with_kept_buffers", "s"),
    "in_turn": ("seconds_in_turn", "s"),
    "peak_reserved": ("peak_reserved_bytes", "B"),
    "peak_allocated": ("peak_allocated_bytes", "B"),
}


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Run the chosen cases under every allocator.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown case.
    """
    cases = _cases.chosen(request.only or (QUICK if options.quick else ()), CASES, "case")
    gpu = visible_gpus(options.device, 1)[0]
    rounds = request.repeats or (2 if options.quick else REPEATS)
    limit_s = request.limit_s or LIMIT_S

    def start(case: str) -> Together:
        arguments = (case, str(rounds))
        jobs = [Job(CHILD, each, arguments, gpu, limit_s, has_steps=True) for each in ALLOCATORS]
        return Together([Started(job) for job in jobs])

    figures, has_failed = measure(cases, start, writer)
    verdicts = judge(cases, figures)
    write_verdicts(verdicts, writer)
    is_good = not has_failed and all(found.is_met for found in verdicts)
    return [table(figures, verdicts), *lines_of(verdicts)], is_good


def measure(
    cases: Iterable[str],
    start: Callable[[str], Together],
    writer: RowWriter,
    allocators: Sequence[Allocator] = ALLOCATORS,
) -> tuple[Figures, bool]:
    """Give the processes of each case their turns; return all figures, and whether one failed.

    Args:
        start: makes a case's processes, in the order of `allocators`.
    """
    figures: Figures = {}
    has_failed = False
    stop = threading.Event()
    with closing(in_batches(cases, start, stop, BATCH)) as started:
        for case, together in started:
            outcomes = together.take_turns([None] * len(allocators), stop)
            for allocator, outcome in zip(allocators, outcomes, strict=True):
                name = f"{case} {allocator.name}"
                has_failed |= not outcome.is_ok
                # Of a process that failed, no round is kept: its memory may be what broke it.
                found = measurements(outcome) if outcome.is_ok else []
                writer.write(name, found, outcome.status)
                figures |= {(name, each.metric): each.values for each in found}
    return figures, has_failed


def measurements(outcome: Outcome) -> list[Measurement]:
    """Return what the rounds of a process measured, and what follows from each round."""
    rounds = outcome.reports
    found = [
        Measurement(metric, unit, [float(line[key]) for line in rounds])
        for key, (metric, unit) in METRICS.items()
    ]
    overlap = [line["fresh"] / line["in_turn"] for line in rounds]
    slowdown = [line["fresh"] / line["kept"] for line in rounds]
    return [
        *found,
        Measurement("ratio_to_in_turn", "1", overlap),
        Measurement("ratio_to_kept_buffers", "1", slowdown),
    ]


def judge(cases: Iterable[str], figures: Figures) -> list[Verdict]:
    """Compare vramx with the better of torch's allocators; what was not measured is not met."""
    return [
        _verdict(case, metric, figures)
        for case in cases
        for metric in GOALS
        if metric == "seconds" or case not in TIMED_ONLY
    ]


def _verdict(case: str, metric: str, figures: Figures) -> Verdict:
    medians = {
        allocator.name: median(values)
        for allocator in ALLOCATORS
        if (values := figures.get((f"{case} {allocator.name}", metric)))
    }
    ours = medians.pop(OURS, None)
    goal = f"<= {GOALS[metric]} of torch's better"
    if ours is None or not medians:
        return Verdict(case, metric, None, goal, False)
    ratio = ours / min(medians.values())
    return Verdict(case, metric, ratio, goal, ratio <= GOALS[metric])


def write_verdicts(verdicts: Iterable[Verdict], writer: RowWriter) -> None:
    """Write each ratio that is known as a row of its own."""
    for case, metric, ratio, *_ in verdicts:
        if ratio is not None:
            name = f"{metric}_ratio_to_better"
            writer.write(f"{case} {OURS}", [Measurement(name, "1", [ratio])])


SHOWN = (
    *("seconds", "seconds_with_kept_buffers", "seconds_in_turn"),
    *("ratio_to_in_turn", "ratio_to_kept_buffers", "peak_reserved_bytes", "peak_allocated_bytes"),
)


def table(figures: Figures, verdicts: Sequence[Verdict]) -> Table:
    """Lay the medians out, one line for each case and allocator."""
    lines = {name: cells(figures, name, SHOWN) for name in names_in(figures)}
    missed = [(f"{case} {OURS}", metric) for case, metric, *_, is_met in verdicts if not is_met]
    return lay_out("programs of several streams", SHOWN, lines, missed)
