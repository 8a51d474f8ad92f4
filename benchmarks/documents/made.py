"""The text that is made: tables, figures, help texts, an explanation, the map of vramx, recipes."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.documents.figures import figure
from benchmarks.documents.tables import TABLES
from benchmarks.harness import ROOT, read_csv
from benchmarks.recipes import PAGES, ROWS, page_table
from vramx.cli.main import main

SNAPSHOT = ROOT / "examples" / "data" / "oom.pickle.gz"
_WIDTH = "80"


def make(words: str) -> str:
    """Return the text that belongs behind a comment with these words.

    Raises:
        LookupError: there is no such thing.
    """
    kind, _, rest = words.partition(" ")
    makers: dict[str, Callable[[str], str]] = {
        "=": figure,
        "table": table,
        "help": help_text,
        "explain": explanation,
        "map": files_map,
        "recipe": lambda name: _block(page_table(name, read_csv(ROWS))),
        "recipes": recipes,
    }
    if kind not in makers:
        raise LookupError(f"nothing is made for {words!r}")
    return makers[kind](rest.strip())


def table(name: str) -> str:
    if name not in TABLES:
        raise LookupError(f"there is no table {name!r}")
    return _block(TABLES[name].lines())


def help_text(verb: str) -> str:
    """Return what the command line says of itself, or of a verb, in a terminal of 80 columns."""
    return _code(_printed([*verb.split(), "--help"]))


def explanation(_: str) -> str:
    """Return what `vramx explain` says of a recorded failure, but for lines that take a page."""
    lines = _printed(["explain", str(SNAPSHOT), "-n", "3"]).splitlines()
    return _code("\n".join(line.rstrip() for line in lines))


def files_map(_: str) -> str:
    """Return each file of vramx/ with the first sentence of its docstring, a table a folder."""
    lines: list[str] = []
    for folder, files in _folders(ROOT / "vramx"):
        lines += [f"### {folder.relative_to(ROOT)}", "", "| file | what it is responsible for |"]
        lines += ["| --- | --- |"]
        lines += [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
        lines += [""]
    return _block(lines[:-1])


def recipes(_: str) -> str:
    """Return the recipes that there are: their titles, and the first sentence of each."""
    found = []
    for path in sorted(PAGES.glob("*.md")):
        if path.name != "index.md":
            title, _, text = path.read_text().removeprefix("# ").partition("\n\n")
            first = re.match(r"(?:\*\*When\.\*\* )?(.*?[.:])(?:\s|$)", text, re.DOTALL)
            words = " ".join(first[1].split()) if first else ""
            found.append(f"- [{title}]({path.name}): {words.rstrip(':')}")
    return _block(found)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line.

    Raises:
        LookupError: it has none.
    """
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])|\n\n", text.replace("\n\n", "\0").replace("\n", " "))
    first = sentence[0].split("\0")[0].strip()
    if not first:
        raise LookupError(f"{path.name} has no docstring")
    return first.replace("|", "\\|").replace("<", "&lt;")


def _folders(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        by_folder.setdefault(path.parent, []).append(path)
    yield from sorted(by_folder.items())


def _printed(arguments: list[str]) -> str:
    """Return what the command line prints, whatever terminal this is."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(arguments)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return out.getvalue().strip("\n")


def _code(text: str) -> str:
    return _block(["```text", text, "```"])


def _block(lines: list[str]) -> str:
    """Return lines with an empty one before and behind, as Markdown wants it beside comments."""
    return "\n\n" + "\n".join(lines) + "\n\n"
