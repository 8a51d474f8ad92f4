"""Runs the cases of a benchmark and keeps what they measured, as rows of a CSV file.

A benchmark is a module of this package with
    DESCRIPTION: str
    cases(options) -> list[str]                   names of what is measured, one process each
    measure(case, options) -> list[Measurement]   called in that process
and, where it may run beside others in a quick run of all, what it shares with them,
    SHARES = "everything"           no figure is a time, or what the whole GPU has in use
    SHARES = "preparation"          it measures in turns (programs/_cases.py), which the GPU sets
                                    the pace of: others may import or plan meanwhile
A case that raises, crashes or hangs is a row with the reason in `status`, never a missing row. A
row says on what it was measured, and names no host, user or folder, so that files can be published.
Starting a case costs about 0.1 s; nothing is measured in the harness's own process.

    python -m benchmarks.harness NAME CASE RESULT     (what the harness calls; options on stdin)
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from benchmarks.machine import Machine, describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
CASE_LIMIT_S = 900.0
AT_ONCE = 3  # benchmarks that share their preparation: one measures
_NOT_BENCHMARKS = {"__init__", "harness", "machine", "plot", "record_traces"}


class UnavailableError(Exception):
    """A benchmark cannot run on this machine at all; the text says what it needs."""


@dataclass(frozen=True)
class Options:
    """What the command line asked for; every benchmark takes the same."""

    quick: bool = False  # fewer cases and repeats: to see that it runs, not to quote
    driver: str = "sim"
    device: int = 0
    traces: str | None = None  # a folder of .npz files


@dataclass(frozen=True)
class Request:
    """What it asked for of benchmarks that start processes of their own."""

    only: tuple[str, ...] = ()
    repeats: int | None = None  # None: as the benchmark sees fit
    jobs: int = 1
    limit_s: int | None = None


@dataclass(frozen=True)
class Measurement:
    """The values of one quantity, one for each repeat."""

    metric: str
    unit: str
    values: list[float]


@dataclass(frozen=True)
class Row:
    """One figure as it is reported. `samples` are the values; four columns are derived from them.

    A CSV file holds OWN_COLUMNS of each row, and in the last column what a run's rows share, as
    JSON: it stands in the run's first row, and a row without it is of the run above.
    """

    benchmark: str
    case: str
    metric: str
    unit: str
    median: float | None
    p10: float | None
    p90: float | None
    repeats: int
    status: str  # "ok" or "failed: REASON"
    commit: str
    dirty: str
    cpu: str
    cores: int
    gpu: str
    driver: str
    torch: str
    python: str
    command: str
    date_utc: str
    samples: str


COLUMNS = [field.name for field in fields(Row)]
OWN_COLUMNS = ["case", "metric", "unit", "status", "samples"]
RUN_COLUMNS = [
    name for name in COLUMNS if name not in {*OWN_COLUMNS, "median", "p10", "p90", "repeats"}
]
FILE_COLUMNS = [*OWN_COLUMNS, "run"]


def names() -> list[str]:
    """Return the benchmarks there are, by file name."""
    found = {path.stem for path in Path(__file__).parent.glob("*.py")}
    # The models that benchmarks train are in files of their own.
    return sorted(name for name in found - _NOT_BENCHMARKS if not name.startswith("models_"))


def load(name: str) -> ModuleType:
    """Import a benchmark by its name."""
    return importlib.import_module(f"benchmarks.{name}")


def rounds(quick: bool) -> list[tuple[list[str], int]]:
    """Return which benchmarks come after which, and how many of each round run at once.

    A run that is to be quoted has one at a time.
    """
    if not quick:
        return [(names(), 1)]
    at_once = {"everything": len(names()), "preparation": AT_ONCE, None: 1}
    shares = {name: getattr(load(name), "SHARES", None) for name in names()}
    return [([n for n, what in shares.items() if what == each], at_once[each]) for each in at_once]


def run(
    name: str, options: Options, command: str, report: Callable[[Row], None] | None = None
) -> list[Row]:
    """Run every case of a benchmark and return its rows.

    Args:
        command: what the user typed, with no folder names, for the rows.
        report: called with each row as soon as it is known.

    Raises:
        UnavailableError: the benchmark cannot run on this machine.
    """
    maker = _RowMaker(name, describe_machine(ROOT), command)
    rows = []
    for case in load(name).cases(options):
        for row in maker.rows(case, *run_case(name, case, options)):
            rows.append(row)
            if report is not None:
                report(row)
    return rows


def run_case(
    name: str, case: str, options: Options, limit_s: float = CASE_LIMIT_S
) -> tuple[list[Measurement], str]:
    """Run one case in a process of its own; return what it measured and its status."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.harness", name, case, str(result)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                input=json.dumps(asdict(options)),
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [], f"failed: no result after {limit_s:.0f} s"
        if done.returncode or not result.exists():
            return [], f"failed: {_reason(done)}"
        return [Measurement(**item) for item in json.loads(result.read_text())], "ok"


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    # A message may name a file of this machine; the repository is the only folder it can know.
    last = (lines[-1] if lines else f"exit code {done.returncode}").replace(f"{ROOT}/", "")
    return last[:200]


class _RowMaker:
    """Turns measurements into rows; holds what all rows of a run share."""

    def __init__(self, name: str, machine: Machine, command: str) -> None:
        self._shared: dict[str, Any] = {
            "benchmark": name,
            "command": command,
            "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            **asdict(machine),
        }

    def rows(self, case: str, measurements: list[Measurement], status: str) -> list[Row]:
        return [
            Row(case=case, status=status, **figures, **self._shared)
            for figures in map(summary, measurements or [Measurement("", "", [])])
        ]


class RowWriter:
    """Appends rows to one CSV file as soon as they are known: a run that is killed keeps them.

    Several GPUs may report at once: each row is written and reported under a lock.

    Args:
        command: what the user typed, with no folder names.
        report: called with each row.
    """

    def __init__(self, name: str, command: str, path: Path, report: Callable[[Row], None]) -> None:
        self._maker = _RowMaker(name, describe_machine(ROOT), command)
        self._path = path
        self._report = report
        self._lock = threading.Lock()
        self.count = 0  # of rows

    def write(self, case: str, measurements: list[Measurement], status: str = "ok") -> None:
        """Append one case; without measurements it is one row that says why."""
        rows = self._maker.rows(case, measurements, status)
        with self._lock:
            append_csv(self._path, rows)
            for row in rows:
                self._report(row)
            self.count += len(rows)


def summary(measurement: Measurement) -> dict[str, Any]:
    """Return the columns that describe one measurement."""
    values = measurement.values
    # More digits than the spread of repeats has say nothing; one value alone is kept in full.
    digits = 6 if len(values) > 1 else 15
    samples = " ".join(f"{value:.{digits}g}" for value in values)
    return {"metric": measurement.metric, "unit": measurement.unit, **_derived(values)} | {
        "samples": samples
    }


def _derived(values: Sequence[float]) -> dict[str, Any]:
    ascending = sorted(values)
    return {
        "median": statistics.median(ascending) if ascending else None,
        "p10": percentile(ascending, 0.1) if ascending else None,
        "p90": percentile(ascending, 0.9) if ascending else None,
        "repeats": len(ascending),
    }


def percentile(ascending: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of the values lie, interpolated linearly.

    Example:
        >>> percentile([1.0, 2.0, 3.0], 0.25)
        1.5
    """
    position = fraction * (len(ascending) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (position - below)


def repeat(function: Callable[[], float], times: int) -> list[float]:
    """Return the results of `times` calls, after one whose result is thrown away (cold caches)."""
    function()
    return [function() for _ in range(times)]


def append_csv(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file, which is made with its header if it is not there.

    Raises:
        ValueError: the file has other columns; it is left as it is.
    """
    is_new = not path.exists()
    if not is_new and read_columns(path) != FILE_COLUMNS:
        raise ValueError(f"{path.name} has other columns than this version writes; move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    run = "" if is_new else _last_run(path)
    with path.open("a", newline="", encoding="utf-8") as file:
        _write(file, map(asdict, rows), run)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of these rows alone, each with the columns of Row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        _write(file, rows, "")


def _write(file: TextIO, rows: Iterable[Mapping[str, Any]], last_run: str) -> None:
    """Write rows behind those of the run `last_run`, or behind a header where there is none."""
    writer = csv.writer(file, lineterminator="\n")
    if not last_run:
        writer.writerow(FILE_COLUMNS)
    for row in rows:
        run = json.dumps({name: str(row[name]) for name in RUN_COLUMNS})
        writer.writerow([*(row[name] for name in OWN_COLUMNS), run if run != last_run else ""])
        last_run = run


def _last_run(path: Path) -> str:
    with path.open(newline="", encoding="utf-8") as file:
        return next((row["run"] for row in reversed(list(csv.DictReader(file))) if row["run"]), "")


def read_columns(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a results file, each with the columns of Row as text."""
    found = []
    shared: dict[str, str] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            run = row.pop("run")
            shared = json.loads(run) if run else shared
            derived = _derived([float(value) for value in row["samples"].split()])
            texts = {name: "" if value is None else str(value) for name, value in derived.items()}
            found.append({**row, **texts, **shared})
    return found


def _child(arguments: list[str]) -> int:
    name, case, result = arguments
    options = Options(**json.load(sys.stdin))
    measurements = load(name).measure(case, options)
    Path(result).write_text(json.dumps([asdict(item) for item in measurements]))
    return 0


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1:]))
