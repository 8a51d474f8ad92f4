"""The pages, and the text in them that is made."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.documents.made import make
from benchmarks.harness import ROOT

# A comment in quotes is one that a page speaks of.
_MADE = re.compile(
    r"(?<!`)<!--\s*(?P<words>(?:= |table |help|explain|map|recipe)[^>]*?)\s*-->"
    r"(?P<text>.*?)<!-- end -->",
    re.DOTALL,
)
# argparse of Python 3.13 writes "-o, --output FILE" where those before write the word twice, and
# breaks its lines elsewhere.
_TWICE = re.compile(r"(-\w) [A-Z]+, (--)")


def pages(root: Path = ROOT) -> list[Path]:
    """Return README.md and the pages of docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def remade(text: str) -> str:
    """Return a page with all that is made in it made anew.

    Raises:
        LookupError: something that is asked for is not there; the text names it.
    """
    return _MADE.sub(_one, text)


def _one(found: re.Match[str]) -> str:
    words = " ".join(found["words"].split())
    made = make(words)
    if words.startswith("help") and plain(made) == plain(found["text"]):
        return found[0]
    return f"{found[0][: found.start('text') - found.start()]}{made}<!-- end -->"


def plain(text: str) -> str:
    """Return a help text without what differs between releases of Python."""
    return " ".join(_TWICE.sub(r"\1, \2", text).split())


def without_made(text: str) -> str:
    """Return a page without what is made in it."""
    return _MADE.sub("", text)
