"""A program while it is written: classes with modules and lines, as Python source.

Values are (batch, TOKENS, width); names of values and modules are unique in a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hypothesis.strategies as st

BATCH, TOKENS = 2, 16
# Rows that are no whole groups are tests/test_compress_norms.py's.
WIDTHS = (64, 128)
HEADER = """\
import torch
import torch.nn.functional as F
from tests.fuzz import pieces
from torch import nn
from torch.utils.checkpoint import checkpoint
"""


class Value(NamedTuple):
    """A tensor of a program: how it is named, and its last dimension."""

    name: str
    width: int

    def __str__(self) -> str:
        return self.name


@dataclass
class Scope:
    """A class that is being written; `values` are those that later lines may read."""

    name: str
    base: str = "nn.Module"
    modules: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def source(self, result: Value) -> str:
        body = "\n".join(f"        {line}" for line in ["super().__init__()", *self.modules])
        lines = "\n".join(f"        {line}" for line in [*self.lines, f"return {result}"])
        return (
            f"class {self.name}({self.base}):\n    def __init__(self):\n{body}\n\n"
            f"    def forward(self, x):\n{lines}\n"
        )


class Writer:
    """Writes one program; `draw` is hypothesis's.

    Attributes:
        smooth: whether all steps so far are.
        powers: how many of them multiply a value by itself.
        overwrites: whether a step writes past autograd.
        spoils: whether a backward pass overwrites what it saved, so that torch's own second pass
            through the graph has other gradients.
        learns: whether there are modules, most of which have parameters.
        packs: whether a call in the program itself packs, in eval() too.
        recomputes: whether a region is recomputed.
        double: whether gradients are to be differentiated.
        keeps_values: what is saved has the values of that moment, whatever is written later.
        names: of the steps that regions may have; empty: all.
        kinds: of the regions that surround what is written.
    """

    def __init__(self, draw: Callable[..., Any], *, double: bool, keeps_values: bool) -> None:
        self.smooth = True
        self.powers = 0
        self.overwrites = self.spoils = False
        self.learns = False
        self.packs = self.recomputes = False
        self.double = double
        self.keeps_values = keeps_values
        self.names: frozenset[str] = frozenset()
        self.kinds: list[str] = []
        self._draw = draw
        self._scopes = [Scope("Program")]
        self._sources: list[str] = []
        self._count = 0

    def choose(self, values: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(values))

    def draw_names(self, names: Sequence[str], most: int) -> list[str]:
        return self._draw(st.lists(st.sampled_from(names), min_size=1, max_size=most))

    def module(self, expression: str) -> str:
        """Add a module; return how it is called."""
        self.learns = True
        name = f"self.{self._name('m')}"
        self._scopes[-1].modules.append(f"{name} = {expression}")
        return name

    def line(self, text: str) -> None:
        self._scopes[-1].lines.append(text)

    def indent_last(self) -> None:
        """Have the last line stand in the one before it."""
        lines = self._scopes[-1].lines
        lines[-1] = f"    {lines[-1]}"

    def let(self, expression: str, width: int) -> Value:
        """Give a name to the value of an expression."""
        value = Value(self._name("h"), width)
        self.line(f"{value} = {expression}")
        return value

    def remember(self, value: Value) -> None:
        self._scopes[-1].values.append(value)

    def earlier(self, width: int) -> Value | None:
        """Return an earlier value of that width, if there is one."""
        fitting = [value for value in self._scopes[-1].values if value.width == width]
        return self.choose(fitting) if fitting else None

    def open(self, kind: str, base: str) -> None:
        """Begin the class of a region."""
        self._scopes.append(Scope(self._name("Region"), base))
        self.kinds.append(kind)

    def close(self, result: Value) -> str:
        """End it; return the name of the class."""
        scope = self._scopes.pop()
        self.kinds.pop()
        self._sources.append(scope.source(result))
        return scope.name

    def source(self, result: Value) -> str:
        return "\n\n".join([HEADER, *self._sources, self._scopes[0].source(result)])

    def _name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"
