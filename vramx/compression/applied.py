"""Which autograd.Function a frame is calling, from torch 2.14 on.

Its `apply` is written in C there, has no frame, and is seen by no mode. What is being called stands
in the frame that calls: the code says where, by the place of the call in the source, and names
alone say what. No code of the program runs for it: an expression with a call or an item in it is
not looked up, nor is a property, and the Function stays unknown. The same before Python 3.11, whose
code has no places. Some ten microseconds for a place in the code, and one or two from then on.
"""

from __future__ import annotations

import dis
import functools
import inspect
from types import BuiltinMethodType, CodeType, FrameType, ModuleType
from typing import Any

import torch

_NAMES = frozenset(
    f"LOAD_{kind}"
    for kind in ("NAME", "GLOBAL", "FAST", "FAST_CHECK", "FAST_BORROW", "DEREF", "CLASSDEREF")
)
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def function_called(frame: FrameType) -> type[torch.autograd.Function] | None:
    """Return the Function whose `apply` a frame is calling, None where that is not told."""
    path = _path(frame.f_code, frame.f_lasti)
    found = _value(frame, path) if path else None
    while isinstance(found, functools.partial):
        found = found.func
    if not isinstance(found, BuiltinMethodType) or found.__name__ != "apply":
        return None
    owner: Any = found.__self__
    is_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return owner if is_function else None


@functools.lru_cache(maxsize=1024)
def _path(code: CodeType, index: int) -> tuple[str, ...]:
    """Return the name and the attributes that are called at a place of some code; empty: others.

    They begin where the call does in the source, and its arguments do not.
    """
    before = [each for each in dis.get_instructions(code) if each.offset <= index]
    place = _start(before[-1]) if before else None
    if place is None or not before[-1].opname.startswith("CALL"):
        return ()
    path: list[str] = []
    for each in reversed(before[:-1]):
        if _start(each) != place:
            continue
        if each.opname.startswith("CALL"):
            return ()
        if each.opname in _NAMES or each.opname in _ATTRIBUTES:
            path.append(each.argval)
        if each.opname in _NAMES:
            return tuple(reversed(path))
    return ()


def _start(instruction: dis.Instruction) -> tuple[int, int] | None:
    positions = getattr(instruction, "positions", None)
    if positions is None or positions.lineno is None or positions.col_offset is None:
        return None
    return positions.lineno, positions.col_offset


def _value(frame: FrameType, path: tuple[str, ...]) -> Any:
    name, *attributes = path
    for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
        if name in names:
            value = names[name]
            break
    else:
        return None
    for attribute in attributes:
        if isinstance(value, (ModuleType, type)):
            value = getattr(value, attribute, None)
        else:
            value = inspect.getattr_static(value, attribute, None)
    return value
