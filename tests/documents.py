"""What the tests of README.md and docs/ share: the pages, their snippets, links and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.documents.pages import pages, without_made
from benchmarks.harness import ROOT

PAGES = {str(path.relative_to(ROOT)): path for path in pages()}

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?)\s*$", re.M)
# A number with a unit of what is measured, or a decimal fraction.
_FIGURE = re.compile(
    r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?: ?(?:%|ms|ns|tokens/s|nat|GB/s)(?!\w)| times\b)"
    r"|(?<![\w.-])\d[\d,]*\.\d+(?![.\w])"
)
_RELEASE = re.compile(
    r"\b(?:torch|PyTorch|Python|Triton|transformers|torchvision|peft|accelerate|Lightning|PyG"
    r"|CUDA|capability) (?:\d[\w.]*(?:,| to| and| or)? ?)+"
)


class Snippet(NamedTuple):
    """A piece of Python in a page, and the line where it begins."""

    page: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: str) -> Iterator[Snippet]:
    """Yield the Python of a page."""
    text = PAGES[page].read_text()
    for fence in _FENCE.finditer(text):
        if fence["language"] == "python":
            line = text.count("\n", 0, fence.start()) + 2
            indent = len(fence["indent"])
            code = "".join(each[indent:] or "\n" for each in fence["code"].splitlines(True))
            yield Snippet(page, line, code)


def prose(text: str) -> str:
    """Return a page without code, comments, targets of links, and what is made in it."""
    text = _FENCE.sub("", without_made(text))
    text = re.sub(r"\]\([^)]*\)", "]", _COMMENT.sub("", text))
    return re.sub(r"`[^`]*`", "", text)


def figures(text: str) -> list[str]:
    """Return the figures that stand in a page's prose as if they were written by hand."""
    return [found.strip() for found in _FIGURE.findall(_RELEASE.sub("", prose(text)))]


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return _LINK.findall(_FENCE.sub("", _COMMENT.sub("", text)))


def anchors(text: str) -> set[str]:
    """Return the names that headings of a page have, as mkdocs and GitHub make them."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    words = [
        re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings
    ]
    return {re.sub(r"\s", "-", word) for word in words}


def broken_links(path: Path, text: str) -> list[str]:
    """Return the links inside of the repository that lead nowhere."""
    broken = []
    for link in links(text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        # The names of the API are made where the pages are built, which checks them.
        has_anchor = (
            not anchor
            or target.name == "api.md"
            or (target.exists() and anchor in anchors(target.read_text()))
        )
        if not target.exists() or not has_anchor:
            broken.append(link)
    return broken
