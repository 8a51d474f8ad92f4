"""The tables of README.md and docs/, by name, as tables.ini describes them."""

from __future__ import annotations

from collections.abc import Iterator
from configparser import ConfigParser, ExtendedInterpolation, SectionProxy
from pathlib import Path

from benchmarks.documents.layout import Column, Show, Table, Words, number
from vramx.sizes import GIB, MIB

# The headings of allocators, and their names in cases.
ALLOCATORS = {"native": "native", "expandable_segments": "expandable", "vramx": "vramx"}
_SIZES = {"GiB": GIB, "MiB": MIB}


def read_tables(path: Path) -> dict[str, Table]:
    """Return the tables that a file describes, by their names."""
    parser = ConfigParser(interpolation=ExtendedInterpolation(), delimiters=("=",))
    parser.read(path, encoding="utf-8")
    return {name: _table(parser[name]) for name in parser.sections()}


def _table(section: SectionProxy) -> Table:
    columns = (column for line in _lines(section, "columns") for column in _columns(line))
    rows, later = (
        dict(_row(row) for line in _lines(section, key) for row in line.split("; "))
        for key in ("rows", "later")
    )
    source, _, first = section["of"].partition(", ")
    is_one_run = section.get("runs") != "several"
    gpu = section.get("gpu", "")
    return Table(source, first, rows, tuple(columns), later, is_one_run, gpu)


def _lines(section: SectionProxy, key: str) -> list[str]:
    return list(filter(None, section.get(key, "").split("\n")))


def _row(text: str) -> tuple[str, str]:
    label, _, name = text.partition(" -> ")
    return label, name or label


def _columns(line: str) -> Iterator[Column]:
    heading, case, metric, form, *optional = (part.strip() for part in line.split("|"))
    needed = not optional
    if form == "words":
        yield Words(heading, case, metric, number("g"), needed)
    elif "*" in heading:
        for label, name in ALLOCATORS.items():
            texts = heading.replace("*", label), case.replace("*", name)
            yield Column(*texts, metric, _show(form), needed)
    else:
        yield Column(heading, case, metric, _show(form), needed)


def _show(form: str) -> Show:
    factor, _, rest = form.rpartition(" * ")
    spec, _, unit = rest.partition(" ")
    scale = float(factor or 1) / _SIZES.get(unit, 1)
    return number(spec, f" {unit}" if unit else "", scale)


TABLES = read_tables(Path(__file__).with_suffix(".ini"))
