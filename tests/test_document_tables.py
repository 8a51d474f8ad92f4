"""Which run a table of the pages shows, and what stands in it where something was not measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.documents import figures, prune, results, tables
from benchmarks.documents.layout import Column, Table, number
from benchmarks.documents.results import PLACE, Row
from benchmarks.harness import COLUMNS, read_csv, write_csv

MACHINE = dict.fromkeys(PLACE, "x") | {"dirty": "no", "gpu": "NVIDIA H200", "torch": "2.11.0"}
MACHINE |= {"command": "vramx bench b --only a"}
TABLE = Table(
    "b",
    "way",
    {"ours": "a", "theirs": "b"},
    (Column("time", "{} case", "ms", number(".1f", " ms")),),
    may_lack={"more": "c"},
)


def row(case: str, median: str, commit: str = "0123456789ab", **values: str) -> Row:
    shared = {**MACHINE, "metric": "ms", "status": "ok", "date_utc": "2026-01-01"}
    return {**shared, "case": f"{case} case", "median": median, "commit": commit, **values}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Row]]:
    """The rows of a benchmark b; they are read when a test asks for a table."""
    kept: list[Row] = []

    def read(path: Path) -> list[Row]:
        assert path.name == "b.csv"
        return kept

    monkeypatch.setattr(results, "read_csv", read)
    results.runs.cache_clear()
    yield kept
    results.runs.cache_clear()


def cells(table: Table = TABLE) -> list[list[str]]:
    lines = [line for line in table.lines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_newest_run_is_shown_that_has_all(rows: list[Row]) -> None:
    rows += [row("a", "1", "old"), row("b", "2", "old")]
    rows += [row("a", "3", "new", date_utc="2026-02-01"), row("b", "4", "new")]
    rows += [row("a", "5", "newest", date_utc="2026-03-01")]
    assert cells() == [["ours", "3.0 ms"], ["theirs", "4.0 ms"]]


def test_a_failed_row_is_no_figure_unless_it_ran_out_of_memory(rows: list[Row]) -> None:
    rows += [row("a", "1"), row("b", "", metric="", status="failed: no result")]
    with pytest.raises(LookupError, match=r"b\.csv"):
        TABLE.lines()
    rows[1]["status"] = "out of memory"
    results.runs.cache_clear()
    assert cells()[1] == ["theirs", "out of memory"]


def test_a_row_that_may_lack_is_there_once_it_was_measured(rows: list[Row]) -> None:
    rows += [row("a", "1"), row("b", "2")]
    assert len(cells()) == 2
    rows.append(row("c", "3"))
    results.runs.cache_clear()
    assert cells()[2] == ["more", "3.0 ms"]


def test_a_table_without_rows_says_that_nothing_was_measured(rows: list[Row]) -> None:
    rows.append(row("a", "1"))
    assert dataclasses.replace(TABLE, rows={}).lines() == ["Not measured yet."]


def test_rows_of_several_runs_name_the_place_of_each(rows: list[Row]) -> None:
    rows += [row("a", "1", "aaaaaaaaa"), row("b", "2", "bbbbbbbbb", dirty="yes")]
    apart = dataclasses.replace(TABLE, is_one_run=False)
    assert [line[1] for line in cells(apart)] == ["1.0 ms", "2.0 ms"]
    place = apart.lines()[-1]
    assert place == "*NVIDIA H200, torch 2.11.0, aaaaaaa, bbbbbbb + changes; `vramx bench b`*"


@pytest.mark.parametrize(
    ("query", "figure"),
    [
        ("t: a case: ms: .0f", "3"),
        ("t: a case / b case: ms: .2f", "0.50"),
        ("t: max * case: ms: .0f", "6"),
        ("t: min * case: ms / rounds: .1f", "1.5"),
        ("t: gmean * case: ms: .3f", "4.243"),
        ("t: max beside *: ms: .0f", "9"),
    ],
)
def test_a_figure_is_of_its_table(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch, query: str, figure: str
) -> None:
    rows += [row("a", "3"), row("b", "6"), {**row("", "9"), "case": "beside case"}]
    rows += [row("a", "2", metric="rounds"), row("b", "2", metric="rounds")]
    monkeypatch.setitem(tables.TABLES, "t", TABLE)
    assert figures.figure(query) == figure


def test_rows_of_runs_that_no_table_shows_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [row("a", "3", "new", date_utc="2026-02-01"), row("b", "4", "new"), row("z", "5", "new")]
    older = [row("a", "1", "old"), row("b", "2", "old")]
    blank = dict.fromkeys(COLUMNS, "")
    found = [{**blank, **each, "samples": each["median"]} for each in older + kept]
    write_csv(tmp_path / "b.csv", found)
    for module in (prune, results):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(prune, "TABLES", {"t": TABLE})
    results.runs.cache_clear()
    assert list(prune.prune()) == ["b.csv: 2 of 5 rows dropped"]
    assert [each["median"] for each in read_csv(tmp_path / "b.csv")] == ["3.0", "4.0", "5.0"]
    assert list(prune.prune()) == []
    results.runs.cache_clear()
