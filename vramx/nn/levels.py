"""The words for what optimize() does with a module, and which of them a module's name gets.

Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from vramx.compression.config import LEVELS as PACKINGS
from vramx.compression.config import Compression
from vramx.errors import InvalidValueError, refused
from vramx.nn.families.swap import RECOMPUTE_ALL, RECOMPUTE_MLP

LEFT = "left"
LEVELS = ("keep", "int8", "int4", RECOMPUTE_MLP, RECOMPUTE_ALL, LEFT)
_MOST_NAMES = 3  # of an error


def levels_of(level: str | Mapping[str, str] | None, keep: Compression) -> dict[str, str]:
    """Return levels by patterns of names; raise for a word that is none."""
    if level is None:
        level = keep.level
    levels = dict(level) if isinstance(level, Mapping) else {"*": level}
    for word in levels.values():
        if word not in LEVELS:
            raise refused("level", word, LEVELS)
    return levels


def check_patterns(patterns: Iterable[str], model: nn.Module) -> None:
    """Raise unless each pattern matches the name of a module."""
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, n=_MOST_NAMES, cutoff=0)
            raise InvalidValueError(
                f"level for {pattern!r}: no module's name matches; closest are "
                f"{', '.join(map(repr, close))}"
            )


def word_for(levels: dict[str, str], name: str) -> str:
    """Return the word of the first pattern that matches a name, LEFT without one."""
    return next((word for pattern, word in levels.items() if fnmatchcase(name, pattern)), LEFT)


def kept_by(word: str, keep: Compression) -> Compression:
    """Return how a level keeps tensors."""
    return replace(keep, level=word) if word in PACKINGS else keep
