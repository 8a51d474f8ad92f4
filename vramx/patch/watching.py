"""Hooks of torch on every module's call that only look on: a watched module is as good as no other.

What is fused leaves out the calls of its parts, which a hook of somebody else may be there to
change. A hook of vramx that takes notes changes nothing, so that a program which is recorded or
predicted stays the program that it is. Costs a look at four dictionaries; thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as modules

from vramx.patch.torch_functions import is_own

Hook = TypeVar("Hook", bound=Callable[..., Any])
_MARK = "vramx_looks_on"
# Python's way to call a module, for it to stay torch's own.
_CALL = nn.Module.__call__ if is_own(nn.Module.__call__, "torch") else None


def looks_on(hook: Hook, around: Callable[..., Any] | None = None) -> Hook:
    """Say of a function or a method that, as a hook on every module, it changes nothing.

    Or that it stands in Module.__call__'s place and does what `around` does, which was there.
    """
    setattr(hook, _MARK, around)
    return hook


def has_other_hooks() -> bool:
    """Tell whether every module's call has a hook that may change what it does."""
    tables = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
    )
    if any(tables) and not all(hasattr(h, _MARK) for each in tables for h in [*each.values()]):
        return True
    call: Any = nn.Module.__call__
    while hasattr(call, _MARK):
        call = getattr(call, _MARK)
    return call is not _CALL
