"""Benchmarks that are a process for each case: which cases, their turns, rows, figures and table.

A case is what a program of this folder is told to measure. It prints a line of JSON for each figure
and one with a status for what it left out. The processes have one GPU in turn, or all at once where
time does not matter. Rows are written as soon as a process has had its turn, and one that fails is
a row that says why. What the goals are is each benchmark's own. Imports no torch. A benchmark calls
this from one thread; a case takes as long as its process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from benchmarks.harness import Measurement, Options, Request, RowWriter
from benchmarks.programs import _launch
from benchmarks.programs._launch import (
    ALLOCATORS,
    PROGRAMS,
    Job,
    Outcome,
    Started,
    in_batches,
    visible_gpus,
)
from vramx.errors import InvalidValueError
from vramx.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

Item = TypeVar("Item")
Result = TypeVar("Result")
MEASURING = threading.Lock()  # who has the GPU, where benchmarks run beside each other
Figures = dict[tuple[str, str], list[float]]  # by case ("llama int8") and metric
# What to show, and whether everything ran and met its goals.
Findings: TypeAlias = "tuple[list[Table | str], bool]"
Goal = tuple[str, str, float, bool]  # case, metric, value, and whether the goal is met


class Verdict(NamedTuple):
    """A figure that has a goal, which is told in words; no value where it was not measured."""

    case: str
    metric: str
    value: float | None
    goal: str
    is_met: bool


def lines_of(verdicts: Sequence[Verdict]) -> list[str]:
    """Say what became of each goal, a line each, and of all."""
    lines = []
    for case, metric, value, goal, is_met in verdicts:
        figure = "not measured" if value is None else f"{value:.4g}"
        lines.append(f"{'ok    ' if is_met else 'MISSED'} {case}: {metric} {figure} ({goal})")
    met = sum(found.is_met for found in verdicts)
    return [*lines, f"{met} of {len(verdicts)} goals met"]


@dataclass(frozen=True)
class Cases:
    """The cases of a benchmark and the program that measures them."""

    program: str
    names: tuple[str, ...]
    quick: tuple[str, ...]
    limit_s: float  # of each, where the request has none
    noun: str = "case"

    def requested(self, options: Options, request: Request) -> tuple[str, ...]:
        """Return the names that the command line asks for, known or not; none are all."""
        return request.only or (self.quick if options.quick else ())

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the cases of these names, or all.

        Raises:
            InvalidValueError: a name is unknown.
        """
        return chosen(names, self.names, self.noun)

    def job(self, options: Options, request: Request) -> Callable[[str], Job]:
        """Return what makes a case's job, on the one GPU that all of them have.

        Raises:
            UnavailableError: there is no GPU.
        """
        gpu = visible_gpus(options.device, 1)[0]
        limit_s = request.limit_s or self.limit_s
        script = PROGRAMS / self.program
        of_all = partial(Job, script, ALLOCATORS[0], gpu=gpu, limit_s=limit_s)
        return lambda case: of_all((case,), is_quick=options.quick)

    def measure(
        self, options: Options, request: Request, writer: RowWriter
    ) -> tuple[Figures, bool]:
        """Give each requested case its turn; return as `measure` of this module does.

        Raises:
            UnavailableError: there is no GPU.
            InvalidValueError: an unknown case.
        """
        cases = self.chosen(self.requested(options, request))
        job = self.job(options, request)
        return measure(cases, lambda case: Started(job(case)), writer)


def chosen(names: Sequence[str], known: Iterable[str], noun: str) -> tuple[str, ...]:
    """Return these names, or all that are known.

    Raises:
        InvalidValueError: a name is unknown.
    """
    accepted = tuple(known)
    for name in names:
        if name not in accepted:
            raise InvalidValueError(
                f"{noun} {name!r} is unknown; accepted are {', '.join(accepted)}"
            )
    return tuple(names) or accepted


def measure(
    cases: Iterable[str], start: Callable[[str], Started], writer: RowWriter
) -> tuple[Figures, bool]:
    """Give each case its turn; return all figures, and whether anything failed."""

    def turn(process: Started) -> Outcome:
        with MEASURING:
            return process.take_turn()

    started = in_batches(cases, start, threading.Event())
    return record(((case, turn(process)) for case, process in started), writer)


def measure_together(
    cases: Sequence[str], job: Callable[[str], Job], writer: RowWriter
) -> tuple[Figures, bool]:
    """Run all cases at once; return as `measure` does."""
    if not cases:
        return {}, False
    stop = threading.Event()
    uses_gpu = any(job(case).gpu != "" for case in cases)
    with MEASURING if uses_gpu else nullcontext():
        outcomes = at_once(cases, lambda case: _launch.run(job(case), stop), stop)
    return record(zip(cases, outcomes, strict=True), writer)


def record(outcomes: Iterable[tuple[str, Outcome]], writer: RowWriter) -> tuple[Figures, bool]:
    """Write the rows of each case; return all figures, and whether anything failed.

    What was skipped, with its reason, has not failed.
    """
    figures: Figures = {}
    has_failed = False
    for case, outcome in outcomes:
        statuses = {line["case"]: line["status"] for line in outcome.reports if "status" in line}
        if not outcome.is_ok:
            statuses[case] = outcome.status
        for name, measurements in by_case(outcome).items():
            writer.write(name, measurements)
            figures |= {(name, found.metric): found.values for found in measurements}
        for name, status in statuses.items():
            writer.write(name, [], status)
            has_failed |= status.startswith("failed")
    return figures, has_failed


def by_case(outcome: Outcome) -> dict[str, list[Measurement]]:
    """Sort the figures that a process printed; one that failed later has told what it had."""
    found: dict[str, list[Measurement]] = {}
    for line in outcome.reports:
        if "status" not in line:
            measurement = Measurement(line["metric"], line["unit"], line["values"])
            found.setdefault(line["case"], []).append(measurement)
    return found


def at_once(
    items: Sequence[Item], work: Callable[[Item], Result], stop: threading.Event
) -> list[Result]:
    """Return what `work` makes of each item, each in a thread; set `stop` where one raises."""
    with ThreadPoolExecutor(len(items)) as pool:
        try:
            futures = [pool.submit(work, item) for item in items]
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C too: nothing may go on running behind the prompt
            stop.set()
            raise


def names_in(figures: Figures) -> list[str]:
    """Return the cases that something was measured of, in their order."""
    return list(dict.fromkeys(case for case, _ in figures))


def cells(
    figures: Figures,
    case: str,
    metrics: Sequence[str],
    middle: Callable[[Sequence[float]], float] = median,
    size: Callable[[float], str] = lambda value: format_size(int(value)),
) -> list[str]:
    """Write the middle of each metric of a case, by `size` if in bytes; empty if not measured."""
    from vramx.cli.bench import figure

    found = []
    for metric in metrics:
        values = figures.get((case, metric))
        write = size if metric.endswith("_bytes") else figure
        found.append(write(middle(values)) if values else "")
    return found


@dataclass(frozen=True)
class Sheet:
    """What a benchmark shows: some metrics of each case, and which of them missed their goals."""

    title: str
    metrics: tuple[str, ...]
    goals: Callable[[Figures], Sequence[Goal]] = lambda _: ()
    middle: Callable[[Sequence[float]], float] = median
    size: Callable[[float], str] = lambda value: format_size(int(value))
    lines: Callable[[Figures], list[str]] = names_in  # the cases that are shown

    def findings(self, figures: Figures, has_failed: bool) -> Findings:
        """Return the table, and whether all ran and met its goals."""
        is_good = not has_failed and all(is_met for *_, is_met in self.goals(figures))
        return [self.table(figures)], is_good

    def table(self, figures: Figures) -> Table:
        """Lay the figures out, one line for each case."""
        lines = {
            case: cells(figures, case, self.metrics, self.middle, self.size)
            for case in self.lines(figures)
        }
        missed = [(case, metric) for case, metric, _, is_met in self.goals(figures) if not is_met]
        return lay_out(self.title, self.metrics, lines, missed)


def cases_with(metric: str) -> Callable[[Figures], list[str]]:
    """Return what finds the cases of which a metric was measured."""
    return lambda figures: [case for case, name in figures if name == metric]


def lay_out(
    title: str,
    headings: Sequence[str],
    lines: Mapping[str, Sequence[str]],
    missed: Sequence[tuple[str, str]],
) -> Table:
    """Lay out a line of cells for each case, and behind it which metrics missed their goals.

    Args:
        missed: case and metric of each such goal.
    """
    from vramx.cli.common import table

    rows = []
    for case, line in lines.items():
        metrics = ", ".join(metric for name, metric in missed if name == case)
        rows.append([case, *line, f"MISSED {metrics}" if metrics else ""])
    columns = [f">{heading.replace('_', ' ')}" for heading in (*headings, "goals")]
    return table(["!case", *columns], rows, title=title)
