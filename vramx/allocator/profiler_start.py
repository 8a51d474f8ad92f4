"""Being there when a profiler of torch starts.

To look for a profiler takes a twentieth of a call, so calls do so only once one was started in this
process. Torch's Python starts every profiler through one of two functions of torch._C._autograd,
which are wrapped wherever torch's modules hold them. A profiler that C++ starts goes by here; the
shim then finds it at one of the first sixteen allocations. Runs in the thread that starts the
profiler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Module by module, in the order in which torch hands the functions on. A module that is imported
# later takes what is wrapped by then.
_HOLDERS = (
    "torch._C._autograd",
    "torch.autograd",
    "torch.autograd.profiler",
    "torch.autograd.profiler_legacy",
)
_STARTS = ("_enable_profiler", "_enable_profiler_legacy")


def watch(note: Callable[[], None]) -> None:
    """Have `note` called before every start of a profiler, and now if one runs; it must not raise.

    Example:
        >>> watch(lambda: print("a profiler starts"))      # doctest: +SKIP
    """
    for module, name, start in found():
        setattr(module, name, _announced(start, note))
    if sys.modules["torch.autograd"]._profiler_enabled():
        note()


def found() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Return each function that starts a profiler, with the module and the name to find it by."""
    modules = [sys.modules[holder] for holder in _HOLDERS if holder in sys.modules]
    return [
        (module, name, getattr(module, name))
        for module in modules
        for name in _STARTS
        if hasattr(module, name)
    ]


def _announced(start: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(start)
    def announced(*args: Any, **kwargs: Any) -> Any:
        note()
        return start(*args, **kwargs)

    return announced
