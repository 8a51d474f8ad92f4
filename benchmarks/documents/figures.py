"""Single figures in prose, each of the run that a table shows.

traces: llama_fixed vramx: peak_reserved_ratio: .3f       the median of one case
traces: max * vramx: peak_reserved_ratio: .3f             over cases: min, max or gmean
train: 3b_24_plan / 3b_24_all: tokens_per_s: .2f          of one case, over another's
plan-llama: max llama budget *: peak_bytes / budget_bytes: .3f      of one metric, over another
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from statistics import geometric_mean

from benchmarks.documents.layout import Table
from benchmarks.documents.results import Run
from benchmarks.documents.tables import TABLES

REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "gmean": geometric_mean,
}


def figure(query: str) -> str:
    """Return the figure that a query asks for.

    Raises:
        LookupError: it names no table, no case or no metric; the text has the query.

    Example:
        >>> figure("train: 3b_24_plan: tokens_per_s: ,.0f")          # doctest: +SKIP
        '28,503'
    """
    parts = [part.strip() for part in " ".join(query.split()).split(": ")]
    if len(parts) != 4 or parts[0] not in TABLES:
        raise LookupError(f"{query!r} is not TABLE: CASE: METRIC: FORMAT, of a table that there is")
    name, case, metric, form = parts
    word, _, pattern = case.partition(" ")
    if word in REDUCE:
        value = REDUCE[word](_values(TABLES[name], pattern, metric))
    else:
        found = [_values(TABLES[name], each, metric)[0] for each in case.split(" / ")]
        value = found[0] / found[1] if len(found) > 1 else found[0]
    return f"{value:{form}}"


def _values(table: Table, pattern: str, metric: str) -> list[float]:
    """Return the figures of all cases of the pattern that a table shows, or else of its run."""
    run = table.run()
    values = _in(table.shown(run), pattern, metric) or _in(run, pattern, metric)
    if not values:
        raise LookupError(f"no row of the run has the case {pattern!r} and the metric {metric!r}")
    return values


def _in(run: Run, pattern: str, metric: str) -> list[float]:
    above, _, below = metric.partition(" / ")
    values = []
    for case in dict.fromkeys(case for case, _ in run.rows):
        if not fnmatch.fnmatchcase(case, pattern):
            continue
        value, divisor = run.value(case, above), run.value(case, below) if below else 1.0
        if value is not None and divisor is not None:
            values.append(value / divisor)
    return values
