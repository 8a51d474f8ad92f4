"""What a plan says: a table of its blocks, lines below it, and the code that does the same.

One content in two forms: text, and HTML for a notebook. Code names blocks as ranges of their
numbers where they have such, so that a model of eighty blocks takes some lines. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torch import nn

from vramx.nn.families.head import heads_of, why_not
from vramx.nn.levels import LEFT
from vramx.patch.table import aligned
from vramx.planning.blocks import Block
from vramx.planning.caches import Caches
from vramx.planning.words import INT8_OFFLOAD, RECOMPUTE_ALL, RECOMPUTE_ALL_OFFLOAD

_NUMBERED = re.compile(r"(?P<before>(?:.*\.)?)(?P<number>\d+)(?P<after>(?:\.[^\d.]+)*)")


@dataclass(frozen=True)
class Sheet:
    """A table, lines below it, and lines of a program."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str]
    code: Sequence[str]


def text_of(sheet: Sheet) -> str:
    """Return a sheet as lines of text.

    Example:
        >>> print(text_of(Sheet(("block", "word"), [("0", "int8")], ["peak 1 GiB"], ["f()"])))
        block  word
        0      int8
        peak 1 GiB
        to write:
            f()
    """
    code = "\n".join(sheet.code).splitlines()
    text = aligned([sheet.head, *sheet.rows])
    return "\n".join([*text, *sheet.lines, "to write:", *(f"    {line}" for line in code)])


def html_of(sheet: Sheet) -> str:
    """Return a sheet as HTML, with the same words."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in sheet.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows
    )
    lines = "".join(f"<p>{escape(line)}</p>" for line in sheet.lines)
    code = escape("\n".join(sheet.code))
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{lines}"
        f"<p>to write:</p><pre>{code}</pre>"
    )


def code_lines(model: nn.Module, words: Mapping[Block, str], caches: Caches) -> Iterator[str]:
    """Yield the lines that do with the blocks of `model` what their words say."""
    yield from caches.code_lines()
    swapped = {
        block.name: "int8" if word == RECOMPUTE_ALL_OFFLOAD else word
        for block, word in words.items()
        if block.known and word not in (LEFT, INT8_OFFLOAD)
    }
    swapped |= {each.name: "keep" for each in heads_of(model) if why_not(each) is None}
    if swapped:
        yield from _optimizing(swapped)
    for word in dict.fromkeys(words.values()):
        names = [b.name for b, own in words.items() if own == word and _is_wrapped(b, word)]
        if names:
            yield f"for name in {_list_of(names)}:"
            yield f"    {_wrapping(word)}"


def _optimizing(levels: Mapping[str, str]) -> Iterator[str]:
    if len(set(levels)) == 1:
        ((name, word),) = levels.items()
        yield f"vramx.optimize(model, {{{name!r}: {word!r}}})"
        return
    yield "levels = {}"
    for word in dict.fromkeys(levels.values()):
        names = [name for name, own in levels.items() if own == word]
        yield f"levels |= dict.fromkeys({_list_of(names)}, {word!r})"
    yield "vramx.optimize(model, levels)"


def _is_wrapped(block: Block, word: str) -> bool:
    """Tell whether a word is done to a block without vramx.optimize."""
    return word in (INT8_OFFLOAD, RECOMPUTE_ALL_OFFLOAD) or (not block.known and word != LEFT)


def _wrapping(word: str) -> str:
    if word in (RECOMPUTE_ALL, RECOMPUTE_ALL_OFFLOAD):
        offload = ", offload=1.0" if word == RECOMPUTE_ALL_OFFLOAD else ""
        module = "model.get_submodule(name)"
        return f"vramx.checkpoint_modules(m := {module}, lambda each: each is m{offload})"
    level = "int8" if word == INT8_OFFLOAD else word
    offload = ", offload=1.0" if word == INT8_OFFLOAD else ""
    return f"vramx.compressed_activations(model.get_submodule(name), level={level!r}{offload})"


def _list_of(names: Sequence[str]) -> str:
    """Return an expression of a list of names.

    Example:
        >>> _list_of(["layers.0", "layers.1", "layers.2", "head"])
        "[*(f'layers.{i}' for i in range(0, 3)), 'head']"
    """
    parts: list[str] = []
    for run in _runs(names):
        before, number, after = _cut(run[0])
        if len(run) < 3:
            parts += map(repr, run)
            continue
        before, after = (x.replace("{", "{{").replace("}", "}}") for x in (before, after))
        pattern = before + "{i}" + after
        parts.append(f"*(f{pattern!r} for i in range({number}, {number + len(run)}))")
    return f"[{', '.join(parts)}]"


def _runs(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield names together that differ by a number that counts up."""
    run: list[str] = []
    for name in names:
        before, number, after = _cut(name)
        if run and number >= 0 and (before, number - len(run), after) == _cut(run[0]):
            run.append(name)
            continue
        if run:
            yield run
        run = [name]
    if run:
        yield run


def _cut(name: str) -> tuple[str, int, str]:
    """Return a name before its last number, that number, and what is after; -1 without one."""
    match = _NUMBERED.fullmatch(name)
    if match is None or str(int(match["number"])) != match["number"]:
        return name, -1, ""
    return match["before"], int(match["number"]), match["after"]
