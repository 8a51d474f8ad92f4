"""Being there when torch initialises CUDA: to remember who did it, and to install just before.

Torch swaps allocators only before that moment, and nobody knows when it comes: an import that asks
for a device's capability is enough. So one function of torch's is wrapped until it is called once:
torch._C._cuda_init, at which every copy of torch.cuda._lazy_init ends (torch.cuda.random holds one
of its own, so replacing the attribute _lazy_init would miss some). Nothing is installed and no
driver is touched before it, so a process that never uses CUDA pays for no allocator, and one that
forks first may still use CUDA in its children.

A few functions of torch._C initialise CUDA in C++, behind that one's back, and then tell torch's
allocator something: that it keeps a history, who hears of failures. An allocator that is installed
later would not know of it. So until then they are wrapped as well, to have CUDA initialised the
usual way first.

Not here: what runs before and after the initialisation; callables are handed in. The wrapped
function raises only what torch's own does. Runs once, under torch's initialisation lock.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

_log = logging.getLogger("vramx")
# Of torch._C: those that initialise CUDA in C++.
_BEHIND = (
    "_cuda_record_memory_history",
    "_cuda_record_memory_history_legacy",
    "_cuda_attach_out_of_memory_observer",
)


@dataclass(frozen=True)
class InitSite:
    """Where CUDA was initialised: the caller outside torch, and the program's line behind it."""

    caller: str
    program: str

    def __str__(self) -> str:
        if self.program in ("", self.caller):
            return self.caller
        return f"{self.caller}, called from {self.program}"


@dataclass
class _Hook:
    """What is known and wanted in this process. Changed under the GIL alone."""

    wrapper: Callable[..., Any] | None = None
    behind: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)
    site: InitSite | None = None
    before: list[Callable[[], None]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)


_hook = _Hook()


def watch() -> None:
    """Wrap the initialisation, if torch is there and CUDA is not initialised yet; idempotent."""
    torch = sys.modules.get("torch")
    native = getattr(torch, "_C", None)
    if torch is None or not hasattr(native, "_cuda_init") or _hook.wrapper is not None:
        return
    if hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return
    assert native is not None  # hasattr(None, "_cuda_init") is false
    _hook.wrapper = _wrap(native, native._cuda_init)
    native._cuda_init = _hook.wrapper
    for name in _BEHIND:
        if hasattr(native, name):
            original = getattr(native, name)
            _hook.behind[name] = original, _initialising(torch, original)
            setattr(native, name, _hook.behind[name][1])


def run_before(action: Callable[[], None]) -> bool:
    """Have `action` called just before CUDA is initialised, once; return whether that is to come.

    Actions run in the order they came in, under torch's initialisation lock: they must not call
    what takes it, torch.cuda._lazy_call above all. An exception out of one is logged, not raised.
    """
    watch()
    if _hook.wrapper is None or _hook.site is not None:
        return False
    if action not in _hook.before:
        _hook.before.append(action)
    return True


def run_after(action: Callable[[], None]) -> None:
    """Have `action` called once CUDA is initialised: now, where it is; what it raises is logged.

    It runs under torch's initialisation lock, like what `run_before` takes.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        _act([action], "after")
        return
    watch()
    _hook.after.append(action)


def first_site() -> InitSite | None:
    """Return who initialised CUDA, where this module was there to see it."""
    return _hook.site


def _wrap(native: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialise(*args: Any, **kwargs: Any) -> Any:
        if native.__dict__.get("_cuda_init") is initialise:
            native.__dict__["_cuda_init"] = original
        for name, (function, wrapper) in _hook.behind.items():
            if native.__dict__.get(name) is wrapper:
                native.__dict__[name] = function
        if _hook.site is None:  # else somebody kept the wrapper, and torch initialises again
            _note_and_act(sys._getframe(1))
        result = original(*args, **kwargs)
        actions, _hook.after = _hook.after, []
        _act(actions, "after")
        return result

    return initialise


def _initialising(torch: ModuleType, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def initialised(*args: Any, **kwargs: Any) -> Any:
        # Not again where somebody kept the wrapper: it would wait for torch's lock of that moment.
        if _hook.site is None:
            torch.cuda.init()
        return function(*args, **kwargs)

    return initialised


def _note_and_act(frame: FrameType) -> None:
    try:
        _hook.site = site_of(frame)
    except Exception as error:
        _hook.site = InitSite("a line that cannot be told", "")
        _log.warning("vramx: who initialises CUDA cannot be told: %s", error)
    actions, _hook.before = _hook.before, []
    _act(actions, "before")


def _act(actions: list[Callable[[], None]], when: str) -> None:
    for action in actions:
        try:
            action()
        except Exception as error:
            _log.warning("vramx: %s the initialisation of CUDA: %s", when, error)


def site_of(frame: FrameType | None) -> InitSite:
    """Return who is behind `frame`: the first caller outside torch, and the program's own line."""
    machinery = (_folder_of("torch"), "<frozen importlib", __file__)
    caller = program = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not caller and not name.startswith(machinery):
            caller = _line_of(frame)
        if frame.f_globals.get("__name__") == "__main__" and not program:
            program = _line_of(frame)
        frame = frame.f_back
    return InitSite(caller or "a line that cannot be told", program)


def _folder_of(package: str) -> str:
    path = getattr(sys.modules.get(package), "__file__", None)
    return f"{Path(path).parent}/" if path else "/nowhere/"


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
