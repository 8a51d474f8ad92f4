"""What `vramx bench` and the benchmarks that run many processes share: a request, and rows that
are on disk as soon as they are known.

A run that is killed keeps what it has. Thread-safe: several GPUs may report at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, Measurement, Row, _RowMaker, append_csv
from benchmarks.machine import describe_machine


@dataclass(frozen=True)
class Request:
    """What the command line asked for, beside the options that all benchmarks share."""

    only: tuple[str, ...] = ()
    repeats: int | None = None  # None: as the benchmark sees fit
    jobs: int = 1
    limit_s: int | None = None


class RowWriter:
    """Appends to one CSV file.

    Args:
        command: what the user typed, with no folder names.
        report: called with each row, under this object's lock.
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
