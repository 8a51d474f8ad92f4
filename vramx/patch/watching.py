"""Hooks of torch on every module's call that only look on: a watched module is as good as no other.

What is fused leaves out the calls of its parts, which a hook of somebody else may be there to
change. A hook of vramx that takes notes changes nothing, so that a program which is recorded or
predicted stays the program that it is. Costs a look at four dictionaries; thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.nn.modules import module as modules

Hook = TypeVar("Hook", bound=Callable[..., Any])
_MARK = "vramx_looks_on"
_TABLES = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


def looks_on(hook: Hook) -> Hook:
    """Say of a function or a method that, as a hook on every module, it changes nothing."""
    setattr(hook, _MARK, True)
    return hook


def has_other_hooks() -> bool:
    """Tell whether every module's call has a hook that may change what it does."""
    found = (
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )
    if not found:
        return False
    tables = (getattr(modules, name) for name in _TABLES)
    return any(not hasattr(hook, _MARK) for table in tables for hook in list(table.values()))
