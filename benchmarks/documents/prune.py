"""Drops the rows of benchmarks/results that are of no run which a table shows.

A run that a table shows is kept whole. Files that no table is of are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.documents.results import PLACE
from benchmarks.documents.tables import TABLES
from benchmarks.harness import RESULTS, read_csv, write_csv


def prune() -> Iterator[str]:
    """Write each file that has such rows anew, and say how many there were."""
    shown: dict[str, set[tuple[str, ...]]] = {}
    for table in TABLES.values():
        run = table.run()
        places = {tuple(row[name] for name in PLACE) for row in table.shown(run).rows.values()}
        shown.setdefault(table.source, set()).update(places)
    for source, places in shown.items():
        path = RESULTS / f"{source}.csv"
        rows = read_csv(path)
        kept = [row for row in rows if tuple(row[name] for name in PLACE) in places]
        if len(kept) < len(rows):
            write_csv(path, kept)
            yield f"{path.name}: {len(rows) - len(kept)} of {len(rows)} rows dropped"
