"""Which autograd.Function a frame is calling, from torch 2.14 on.

Its `apply` is written in C there, has no frame, and is seen by no mode. What is being called stands
in the frame that calls: the code says where, by the place of the call in the source, and names
alone say what. No code of the program runs for it: an expression with a call or an item in it is
not looked up, nor is a property, and the Function stays unknown. So does one that a local name has
before Python 3.13, where to look one up is to keep all of them alive as long as the frame, and all
before 3.11, whose code has no places. A tenth of a millisecond for a place in the code, and one or
two microseconds from then on.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from types import BuiltinMethodType, CodeType, FrameType, ModuleType
from typing import Any

import torch

_LOCALS = frozenset(f"LOAD_{kind}" for kind in ("FAST", "FAST_CHECK", "FAST_BORROW", "DEREF"))
_GLOBALS = frozenset({"LOAD_NAME", "LOAD_GLOBAL"})
_NAMES = _LOCALS | _GLOBALS
# From Python 3.13 on what stands for a frame's locals is no copy of them.
_SEES_LOCALS = sys.version_info >= (3, 13)
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
            told = _SEES_LOCALS or each.opname in _GLOBALS
            return tuple(reversed(path)) if told else ()
    return ()


def _start(instruction: dis.Instruction) -> tuple[int, int] | None:
    positions = getattr(instruction, "positions", None)
    if positions is None or positions.lineno is None or positions.col_offset is None:
        return None
    return positions.lineno, positions.col_offset


def _value(frame: FrameType, path: tuple[str, ...]) -> Any:
    name, *attributes = path
    places = (frame.f_globals, frame.f_builtins)
    for names in (frame.f_locals, *places) if _SEES_LOCALS else places:
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
