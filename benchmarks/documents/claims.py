"""What the pages say of each benchmark's figures, for a run to be laid beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.documents.layout import Table
from benchmarks.documents.results import Cell, Run
from benchmarks.documents.tables import TABLES


class Claim(NamedTuple):
    """A figure that a table shows, and what it was measured on."""

    value: float
    machine: str


def claims(sources: Iterable[str], gpu: str) -> dict[tuple[str, str, str], Claim]:
    """Return what the tables of these benchmarks show, by benchmark, case and metric.

    Args:
        gpu: where several tables show a figure, that of this GPU is taken.
    """
    wanted = set(sources)
    found: dict[tuple[str, str, str], Claim] = {}
    for table in TABLES.values():
        if table.source not in wanted:
            continue
        try:
            run = table.run()
        except (LookupError, OSError):  # a table whose rows are not here says nothing
            continue
        for case, metric in _cells(table, run):
            key, value = (table.source, case, metric), run.value(case, metric)
            if value is not None and (key not in found or run.gpu == gpu):
                found[key] = Claim(value, run.machine)
    return found


def _cells(table: Table, run: Run) -> list[Cell]:
    names = table.shown_rows(run).values()
    return [each.cell(name) for name in names for each in table.columns]
