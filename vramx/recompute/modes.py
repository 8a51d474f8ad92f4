"""Modes and switches of torch, and context variables, for a recomputation as a region had them.

`with torch.device(...)`, a mode of the program's own that changes what functions do, a default
dtype, sdpa_kernel() around the forward pass: backward, which is outside of it, would compute
another function, or save other tensors. A recomputation is under the same, and under what is
entered by then. Not restored are the dispatcher's modes of torch's own, which look on: a counter
has counted the region. Random numbers, autocast and grad mode are torch's checkpoint's. Switches
belong to the process, and are only set where they differ. So are the weights that
parametrize.cached() has for the second module that reads them: computed again in that one's place,
a recomputation would save other tensors. A microsecond or two a call.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import overrides
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch as dispatch

_PARAMETRIZE: Any = parametrize
# How a switch is read, and set.
_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _of_core(names: Iterable[tuple[str, str]]) -> Iterator[_Switch]:
    core: Any = torch._C
    for read, write in names:
        if hasattr(core, read) and hasattr(core, write):  # releases differ
            yield getattr(core, read), getattr(core, write)


_ATTENTIONS = ("flash", "fa3", "mem_efficient", "math", "cudnn", "overrideable")
_CHOICES = ("enabled", "deterministic", "benchmark")
_SWITCHES: tuple[_Switch, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *_of_core((f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}") for kind in _ATTENTIONS),
    *_of_core((f"_get_cudnn_{name}", f"_set_cudnn_{name}") for name in _CHOICES),
)
# The order in which torch tries the kernels of attention. It puts cuDNN's first, on a Hopper, when
# a process first calls attention: read before the call it is not the one that the call had.
_SET_AT_FIRST_CALL = tuple(_of_core([("_get_sdp_priority_order", "_set_sdp_priority_order")]))


class Modes:
    """The modes of this thread and the switches as they are now."""

    def __init__(self) -> None:
        self._functions = _function_modes()
        self._dispatchers = _dispatch_modes()
        self._values = [read() for read, _ in _SWITCHES]
        self._variables = contextvars.copy_context()
        self._cached = _cached_weights()
        self.settle()

    def settle(self) -> None:
        """Note what torch sets at the first call, as the first run left it."""
        self._late = [read() for read, _ in _SET_AT_FIRST_CALL]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Be under those of then meanwhile."""
        with contextlib.ExitStack() as stack:
            switches = zip(
                (*_SWITCHES, *_SET_AT_FIRST_CALL), (*self._values, *self._late), strict=True
            )
            for (read, write), then in switches:
                now = read()
                if now != then:
                    write(then)
                    stack.callback(write, now)
            variables = contextvars.copy_context()
            if self._cached is not None or _PARAMETRIZE._cache_enabled:
                stack.enter_context(_caching(self._cached))
            for variable, value in self._variables.items():
                if variable not in variables or variables[variable] is not value:
                    stack.callback(variable.reset, variable.set(value))
            known = _function_modes()
            for mode in self._functions:
                if not any(mode is other for other in known):
                    overrides._push_mode(mode)
                    stack.callback(overrides._pop_mode)
            entered = _dispatch_modes()
            for mode in self._dispatchers:
                if not any(mode is other for other in entered):
                    dispatch._push_mode(mode)
                    stack.callback(dispatch._pop_mode)
            yield


def _cached_weights() -> dict[Any, Any] | None:
    """Return the weights that were computed so far under parametrize.cached(); None: not under."""
    return dict(_PARAMETRIZE._cache) if _PARAMETRIZE._cache_enabled else None


@contextlib.contextmanager
def _caching(weights: dict[Any, Any] | None) -> Iterator[None]:
    """Be under parametrize.cached() with some weights meanwhile; None: not under it."""
    outer = _PARAMETRIZE._cache, _PARAMETRIZE._cache_enabled
    _PARAMETRIZE._cache, _PARAMETRIZE._cache_enabled = dict(weights or {}), int(weights is not None)
    try:
        yield
    finally:
        _PARAMETRIZE._cache, _PARAMETRIZE._cache_enabled = outer


def _function_modes() -> list[Any]:
    if not torch._C._len_torch_function_stack():
        return []
    modes = overrides._get_current_function_mode_stack()
    return [mode for mode in modes if not type(mode).__module__.startswith("vramx.")]


def _dispatch_modes() -> list[Any]:
    if not torch._C._len_torch_dispatch_stack():
        return []
    modes = dispatch._get_current_dispatch_mode_stack()
    owners = [type(mode).__module__.partition(".")[0] for mode in modes]
    return [m for m, owner in zip(modes, owners, strict=True) if owner not in ("torch", "vramx")]
