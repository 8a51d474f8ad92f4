"""Stack traces of allocations: kept once each, and named by the line of the program's own code.

Frames are innermost first, as torch records them. Torch shares the frames among the stacks, and
one list among some events of a stack; the table finds a stack by the identity of its frames then,
and by its content where a format (JSON) has copied them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """One line of a stack trace."""

    name: str
    filename: str
    line: int

    def __str__(self) -> str:
        if not self.filename:
            return self.name
        return f"{short_path(self.filename)}:{self.line} {self.name}"


Stack = tuple[Frame, ...]

NO_STACK: Stack = ()
PREDATING: Stack = (Frame("(before the recording)", "", 0),)

# Where installed code lies, and torch's own where it is built from source.
_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib/python3[\d.]*)/"
    r"|(?:^|/)torch/(?:_\w+|amp|autograd|cuda|distributed|fx|nn|optim|utils)(?:/|\.py$)"
    r"|^<(?:frozen|string|eval_with_key)"
)
_PYTHON = re.compile(r"\.pyw?$|^<")
_OWN_IN_LINE = 2  # the line that asked, and who called it
_INSTALLED = re.compile(r".*(?:site-packages|dist-packages)/")


class StackTable:
    """Every different stack, by number; 0 is that of an event without one."""

    def __init__(self) -> None:
        self.stacks: list[Stack] = [NO_STACK, PREDATING]
        self._by_content = {NO_STACK: 0, PREDATING: 1}
        self._by_identity: dict[tuple[int, ...], int] = {}
        self._frames: dict[int, Frame] = {}  # by the identity of their records

    def number(self, frames: Any) -> int:
        """Return the number of a record's frames, which must stay alive while the table is used."""
        if not isinstance(frames, (list, tuple)):
            return 0
        key = tuple(map(id, frames))
        found = self._by_identity.get(key)
        if found is None:
            found = self._by_identity[key] = self._number_of_content(frames)
        return found

    def _number_of_content(self, frames: list[Any] | tuple[Any, ...]) -> int:
        stack = tuple(self._frame(record) for record in frames if isinstance(record, dict))
        found = self._by_content.setdefault(stack, len(self.stacks))
        if found == len(self.stacks):
            self.stacks.append(stack)
        return found

    def _frame(self, record: dict[str, Any]) -> Frame:
        found = self._frames.get(id(record))
        if found is None:
            found = self._frames[id(record)] = _frame(record)
        return found


def _frame(record: dict[str, Any]) -> Frame:
    line = record.get("line")
    return Frame(
        printable(record.get("name", "?")),
        printable(record.get("filename", "?")),
        line if type(line) is int else 0,
    )


def printable(value: Any) -> str:
    """Return text that cannot move a terminal's cursor."""
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def is_own_code(frame: Frame) -> bool:
    """Say whether a frame is of the program, and not of a library or of C++."""
    return _is_own_file(frame.filename)


@lru_cache(maxsize=4096)  # a recording asks a million times of a few hundred files
def _is_own_file(filename: str) -> bool:
    name = filename.replace("\\", "/")
    return bool(_PYTHON.search(name)) and not _LIBRARY.search(name)


def short_path(filename: str) -> str:
    """Return a file's path without what every path has: inside a package, or its last folder.

    Example:
        >>> short_path("/usr/lib/python3/dist-packages/torch/nn/functional.py")
        'torch/nn/functional.py'
        >>> short_path("/home/me/project/train.py")
        'project/train.py'
    """
    path = filename.replace("\\", "/")
    inside = _INSTALLED.sub("", path)
    return inside if inside != path else "/".join(path.split("/")[-2:])


def shown_frames(stack: Stack) -> Stack:
    """Return the frames that tell an allocation apart: the program's own, and the innermost."""
    own = tuple(frame for frame in stack if is_own_code(frame))
    if not own:
        return stack
    return own if own[0] == stack[0] else (stack[0], *own)


def describe(stack: Stack) -> str:
    """Say in one line where an allocation was made: the program's lines, and what they called.

    Example:
        >>> describe((Frame("linear", "site-packages/torch/nn/functional.py", 9),
        ...           Frame("forward", "model.py", 12), Frame("train", "train.py", 40)))
        'model.py:12 forward < train.py:40 train (functional.py:9 linear)'
    """
    if not stack:
        return "(no stack recorded, as in backward)"
    shown = shown_frames(stack)
    own = [frame for frame in shown if is_own_code(frame)][:_OWN_IN_LINE]
    if not own:
        return str(stack[0])
    lines = " < ".join(map(str, own))
    if own[0] == stack[0]:
        return lines
    called = stack[0]
    return f"{lines} ({called.filename.rpartition('/')[2]}:{called.line} {called.name})"
