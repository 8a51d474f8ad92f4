"""How a table is laid out: its rows and columns, and the text of a figure. Pure, but for the rows.

Rows are names, which the columns put into the names of cases and metrics: "{} vramx" is the case
"llama_fixed vramx" in the row llama_fixed. A column that is needed must be in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from benchmarks.documents.results import OUT_OF_MEMORY, Cell, Run, newest

Show = Callable[[float], str]


def number(form: str, unit: str = "", scale: float = 1.0) -> Show:
    """Return what writes a figure in a unit, after multiplying it."""
    return lambda value: f"{value * scale:{form}}{unit}"


@dataclass(frozen=True)
class Column:
    """A figure of each row."""

    heading: str
    case: str
    metric: str
    show: Show
    is_needed: bool = True

    def cell(self, name: str) -> Cell:
        """Return the figure of a row."""
        return self.case.format(name), self.metric.format(name)

    def text(self, run: Run, name: str) -> str:
        """Return what stands in a row: a figure, that memory ran out, or nothing."""
        case, metric = self.cell(name)
        if run.ran_out(case):
            return OUT_OF_MEMORY
        value = run.value(case, metric)
        return "" if value is None else self.show(value)


class Words(Column):
    """How many blocks a plan treats in which way."""

    def text(self, run: Run, name: str) -> str:
        found = run.metrics(self.case.format(name))
        return ", ".join(
            f"{count:.0f} `{metric.removeprefix('blocks_')}`"
            for metric, count in found.items()
            if metric.startswith("blocks_")
        )


@dataclass(frozen=True)
class Table:
    """A table of one benchmark.

    source: the name of its file. heading: of the first column. rows: label -> name.
    may_lack: rows that are left out where the run does not have them.
    is_one_run: its rows are of one run; else each is of the newest that has it.
    gpu: what the name of the GPU begins with that they were measured on.
    """

    source: str
    heading: str
    rows: Mapping[str, str]
    columns: tuple[Column, ...]
    may_lack: Mapping[str, str] = field(default_factory=dict)
    is_one_run: bool = True
    gpu: str = ""

    def needed(self, name: str) -> list[Cell]:
        """Return the figures that a row must have."""
        return [each.cell(name) for each in self.columns if each.is_needed]

    def run(self) -> Run:
        """Return what the table shows.

        Raises:
            LookupError: a figure is in no run.
        """
        if self.is_one_run:
            needed = [cell for name in self.rows.values() for cell in self.needed(name)]
            return newest(self.source, needed, self.gpu)
        return reduce(or_, map(self._row_run, self.rows.values()))

    def _row_run(self, name: str) -> Run:
        run = newest(self.source, self.needed(name), self.gpu)
        return run.part(each.cell(name)[0] for each in self.columns)

    def shown_rows(self, run: Run) -> dict[str, str]:
        """Return the rows that the table has in a run."""
        found = {
            label: name
            for label, name in self.may_lack.items()
            if all(map(run.has, self.needed(name)))
        }
        return {**self.rows, **found}

    def shown(self, run: Run) -> Run:
        """Return the part of a run whose place is to be named."""
        names = self.shown_rows(run).values()
        return run.part(each.cell(name)[0] for name in names for each in self.columns)

    def lines(self) -> list[str]:
        """Return the table in Markdown, and below it where it was measured."""
        run = self.run()
        rows = self.shown_rows(run)
        if not rows:
            return ["Not measured yet."]
        headings = [self.heading, *(each.heading for each in self.columns)]
        body = [
            [label, *(each.text(run, name) for each in self.columns)]
            for label, name in rows.items()
        ]
        lines = [_line(headings), _line(["---"] * len(headings)), *map(_line, body)]
        return [*lines, "", self.shown(run).place]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
