"""Tables as lines of text; of modules with equal rows as one: layers.0, layers.1 and so on are.

Pure; any thread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return lines with a count of modules, and under `head` the rows; the first item is a name.

    Example:
        >>> print(table(("name", "class"), [("layers.0", "Block"), ("layers.1", "Block")]))
        modules  name      class
        2        layers.*  Block
    """
    counts = Counter((_pattern(name), *others) for name, *others in rows)
    lines = [("modules", *head), *((str(count), *row) for row, count in counts.items())]
    return "\n".join(aligned(lines))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells as text, each column as wide as its widest cell.

    Example:
        >>> aligned([("a", "b"), ("long", "c")])
        ['a     b', 'long  c']
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _pattern(name: str) -> str:
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) or "(model)"
