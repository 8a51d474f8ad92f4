"""Programs that are written by hand: their source from a few lines, and what surrounds them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tests.fuzz.settings import Setting
from tests.fuzz.writer import HEADER

_OPTIONS = {"min_bytes": 0, "group_size": 64, "rounding": "stochastic", "deterministic": True}


def program(modules: Sequence[str], lines: Sequence[str], region: Sequence[str] = ()) -> str:
    """Return a program with modules a, b, ... and lines that take h and give it."""
    made = [f"self.{chr(ord('a') + i)} = {module}" for i, module in enumerate(modules)]
    inside = _class("Region", (), region) if region else ""
    return "\n\n".join([HEADER, inside, _class("Program", made, lines)])


def _class(name: str, made: Sequence[str], lines: Sequence[str]) -> str:
    init = "\n".join(["super().__init__()", *made])
    body = "\n".join(["h = x", *lines, "return h"])
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n{textwrap.indent(init, ' ' * 8)}\n\n"
        f"    def forward(self, x):\n{textwrap.indent(body, ' ' * 8)}\n"
    )


def setting(**fields: object) -> Setting:
    """Return a setting whose noise repeats; `rounding` is an option, the others are fields."""
    options = _OPTIONS | {key: fields.pop(key) for key in ("rounding",) if key in fields}
    return Setting(**{"options": options, "seed": 1, **fields})  # type: ignore[arg-type]
