"""The rows of benchmarks/results, and which of them a table shows: the newest complete run.

A run is what was measured at one commit on one machine. The newest run that has every figure which
is needed is taken, so that a run of a few cases does not take a table's place, and figures of
different machines never stand beside each other unless a table asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from benchmarks.harness import RESULTS, read_csv

Row = dict[str, str]
Cell = tuple[str, str]  # case, metric

PLACE = ("commit", "dirty", "cpu", "cores", "gpu", "driver", "torch")
OUT_OF_MEMORY = "out of memory"


class Run:
    """The last row of each figure that was measured at one place; of several joined runs, all."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {(row["case"], row["metric"]): row for row in rows}

    def __or__(self, other: Run) -> Run:
        return Run([*self.rows.values(), *other.rows.values()])

    def has(self, cell: Cell) -> bool:
        """Say whether a figure was measured, or is none because memory ran out."""
        return self.value(*cell) is not None or self.ran_out(cell[0])

    def value(self, case: str, metric: str) -> float | None:
        """Return the median of a figure."""
        row = self.rows.get((case, metric))
        return float(row["median"]) if row and row["status"] == "ok" else None

    def ran_out(self, case: str) -> bool:
        """Say whether a case ran out of memory."""
        row = self.rows.get((case, ""))
        return row is not None and row["status"] == OUT_OF_MEMORY

    def metrics(self, case: str) -> dict[str, float]:
        """Return the medians of a case, in the order of the file."""
        found = {metric: self.value(each, metric) for each, metric in self.rows if each == case}
        return {metric: value for metric, value in found.items() if value is not None}

    def part(self, cases: Iterable[str]) -> Run:
        """Return the rows of these cases alone."""
        kept = set(cases)
        return Run(row for (case, _), row in self.rows.items() if case in kept)

    @property
    def gpu(self) -> str:
        """The GPU, of joined runs one of them."""
        return next(iter(self.rows.values()))["gpu"]

    @property
    def machine(self) -> str:
        """The GPU's name or the processor's, of joined runs one of them."""
        return _machine(next(iter(self.rows.values())))

    @property
    def place(self) -> str:
        """Say where it was measured, with which command."""
        rows = list(self.rows.values())
        machines = dict.fromkeys(map(_machine, rows))
        releases = dict.fromkeys(f"torch {row['torch']}" for row in rows)
        commits = dict.fromkeys(
            row["commit"][:7] + (" + changes" if row["dirty"] == "yes" else "") for row in rows
        )
        commands = dict.fromkeys(row["command"] for row in rows)
        command = next(iter(commands)).split(" --only")[0]
        return f"*{', '.join([*machines, *releases, *commits])}; `{command}`*"


def _machine(row: Row) -> str:
    if row["gpu"] in {"none", "unknown"}:
        return f"{row['cpu']}, {row['cores']} cores"
    # Several GPUs of one kind are named one after the other; a case has one.
    return row["gpu"].split(",")[0]


@cache
def runs(source: str) -> tuple[Run, ...]:
    """Return the runs of a benchmark, the newest first."""
    by_place: dict[tuple[str, ...], list[Row]] = {}
    for row in read_csv(RESULTS / f"{source}.csv"):
        by_place.setdefault(tuple(row[name] for name in PLACE), []).append(row)
    newest = sorted(
        by_place.values(), key=lambda rows: max(row["date_utc"] for row in rows), reverse=True
    )
    return tuple(map(Run, newest))


def newest(source: str, needed: Iterable[Cell], gpu: str = "") -> Run:
    """Return the newest run that has all the figures which are needed.

    Args:
        gpu: what the name of its GPU begins with.

    Raises:
        LookupError: no run has; the text names what the newest lacks.
    """
    cells = list(needed)
    tried = [run for run in runs(source) if run.gpu.startswith(gpu)]
    for run in tried:
        if all(map(run.has, cells)):
            return run
    lacking = [cell for cell in cells if not any(run.has(cell) for run in tried)]
    place = f" on {gpu}" if gpu else ""
    raise LookupError(f"{source}.csv: no run{place} has all of {(lacking or cells)[:3]} and others")
