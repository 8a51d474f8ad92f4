"""Whose saved-tensor hooks are innermost on this thread: a checkpoint's, ours, or another's.

torch runs the innermost pair only. From 2.8 on it says which that is; before, a checkpoint is
found by its frames on the call stack, and ours are noted here, as if there were no others. Look-ups
of some hundred nanoseconds, before 2.8 of microseconds; any thread, each with its own stack.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

# The hooks of torch.utils.checkpoint: while a region runs, and while it is run again.
FORWARD_HOOK = "_checkpoint_hook."
RECOMPUTE_HOOK = "_recomputation_hook."

_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def is_told() -> bool:
    """Tell whether torch says which hooks are the innermost."""
    return _top_hooks is not None


class _Noted(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Any] = []


_noted = _Noted()


def note(hook: Any) -> None:
    """Note a pack hook of ours that is pushed now."""
    _noted.hooks.append(hook)


def forget() -> None:
    """Note that the last one has been popped."""
    _noted.hooks.pop()


def forget_hook(hook: Any) -> None:
    """Note that a hook has been popped, unless that is noted."""
    if _noted.hooks and _noted.hooks[-1] is hook:
        forget()


def top_hook() -> Any:
    """Return the innermost pack hook, None where there is none; before 2.8, of ours."""
    if not is_told():
        return _noted.hooks[-1] if _noted.hooks else None
    top = top_hooks()
    return top[0] if top else None


def top_hooks() -> tuple[Any, Any] | None:
    """Return the innermost pair of hooks, None where there is none or torch does not tell."""
    top: tuple[Any, Any] | None = _top_hooks(False) if is_told() else None
    return top


class Hooks(saved_tensors_hooks):
    """Hooks of which an interrupt leaves none behind while they are put on; from 2.8 on."""

    def __enter__(self) -> None:
        try:
            super().__enter__()
        except BaseException:
            if is_told() and top_hook() is self.pack_hook:
                self.__exit__()
            raise


def name_of(hook: Any) -> str:
    """Return the qualified name of a hook's function, empty for None."""
    return "" if hook is None else str(getattr(hook, "__qualname__", type(hook).__qualname__))


def in_checkpoint() -> bool:
    """Tell whether a non-reentrant torch.utils.checkpoint manages what is saved now."""
    if not is_told():
        return _checkpoint_is_on_the_stack()
    return name_of(top_hook()).startswith((FORWARD_HOOK, RECOMPUTE_HOOK))


def _checkpoint_is_on_the_stack() -> bool:
    frame: FrameType | None = sys._getframe(1)
    file, entry = torch_checkpoint.__file__, _code_of(torch_checkpoint.checkpoint)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file:
            if code is entry and not frame.f_locals.get("use_reentrant"):
                return True
            if code.co_name == "recompute_fn":
                return True
        frame = frame.f_back
    return False


def _code_of(function: Any) -> CodeType:
    """Return the code of a function below its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code
