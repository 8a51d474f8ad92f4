"""What the documentation's site needs beside mkdocs.yml: a hook of mkdocs, an extension of griffe.

The hook has every page of docs/recipes in the navigation. The extension reads our docstrings, whose
section is "Example:", as griffe's style does, whose section is "Examples:"; else the code in it
would be taken for prose.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

FOLDER = "recipes/"


def on_config(config: Any) -> Any:
    """Put the pages of the folder where mkdocs.yml names the folder, the index first."""
    root = Path(config["docs_dir"])
    found = sorted(str(path.relative_to(root)) for path in (root / FOLDER).glob("*.md"))
    pages = sorted(found, key=lambda name: not name.endswith("index.md"))
    for section in config["nav"]:
        if isinstance(section, dict):
            section.update({title: pages for title, page in section.items() if page == FOLDER})
    return config


class Docstrings(griffe.Extension):
    """Names the section of examples as griffe does, and gives each parameter a line of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one object's docstring."""
        if obj.docstring is not None:
            text = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
            obj.docstring.value = _SEVERAL.sub(_one_by_one, text)


# "weight, bias: ..." with the lines that belong to it.
_SEVERAL = re.compile(
    r"^(?P<indent> {4})(?P<names>\w+(?:, \w+)+)(?P<text>: .*(?:\n(?P=indent) +\S.*)*)", re.M
)


def _one_by_one(found: re.Match[str]) -> str:
    names = found["names"].split(", ")
    return "\n".join(f"{found['indent']}{name}{found['text']}" for name in names)
