"""Questions of modules and of calls, which families decide by: classes, hooks, parameters, caches.

No state; any thread. Each takes some microseconds.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from vramx.patch.subclass import RECORD
from vramx.patch.torch_functions import is_own
from vramx.patch.watching import has_other_hooks
from vramx.recompute.copies import is_cache

# Stands for the parameter that takes a cache, which releases of transformers call otherwise.
CACHE = "past_key_values"


def class_name(cls: type) -> str:
    """Return a class's module and name, by which families know it.

    Example:
        >>> class_name(nn.Linear)
        'torch.nn.modules.linear.Linear'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def untouched(module: Any) -> bool:
    """Tell whether calling a module does nothing but its class's own forward."""
    return unhooked(module) and _has_own_forward(type(module))


def unhooked(module: Any) -> bool:
    """Tell whether calling a module does nothing but what its class's forward is now."""
    state = module.__dict__
    return not (
        "forward" in state
        or state.get(RECORD) is not None
        or state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )


@torch.compiler.assume_constant_result
def _has_own_forward(cls: type[nn.Module]) -> bool:
    """Tell whether a class computes what its module says, and nobody has given it another."""
    forward: Any = cls.forward
    if _own_forwards.get(cls) is forward:
        return True
    found = bool(forward.__module__ == cls.__module__)
    if hasattr(forward, "__wrapped__"):  # what wraps another says the other's module
        found = found and is_own(forward, cls.__module__.partition(".")[0])
    if found:
        _own_forwards[cls] = forward
    return found


# Of a class, the forward that was found to be its own.
_own_forwards: dict[type, Any] = {}


# Of a class, the functions with which a module of it was compared with what its family computes.
_functions: dict[type, tuple[Callable[[type], Any], Any]] = {}


def functions_of(cls: type[nn.Module]) -> tuple[Callable[[type], Any], Any]:
    """Return what looks up the functions of a class, and what it finds now."""
    names = [name for name, value in vars(cls).items() if isinstance(value, FunctionType)]
    look = operator.attrgetter(*dict.fromkeys(("forward", *names)))
    return look, look(cls)


def note_functions(cls: type[nn.Module]) -> None:
    """Note the functions of a class, with which it does what is known of it."""
    _functions[cls] = functions_of(cls)


def has_its_functions(cls: type[nn.Module]) -> bool:
    """Tell whether a class has no other functions than were noted."""
    if cls not in _functions:  # of a module that was copied from another process
        note_functions(cls)
    look, known = _functions[cls]
    return bool(look(cls) == known)


def all_untouched(modules: Iterable[Any]) -> bool:
    """Tell whether all are untouched(), and all of modules in general."""
    if has_other_hooks():
        return False
    for module in modules:  # noqa: SIM110 - a generator for all() costs as much as the questions
        if not untouched(module):
            return False
    return True


def part_of(module: Any, path: str) -> Any:
    """Return what a dotted path leads to; None if there is nothing."""
    for name in path.split(".") if path else ():
        held = getattr(module, "_modules", None)
        module = held[name] if held and name in held else getattr(module, name, None)
    return module


def names_of(module: Any) -> Any:
    """Return the Python module that a module's class is from, where its functions are found."""
    return sys.modules[type(module).__module__]


def cache_of(call: dict[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the cache that a call is given; "" and None: it has none."""
    for name, value in call.items():
        if is_cache(value):
            return name, value
    return "", None


def parameters_of(module: Any) -> list[inspect.Parameter]:
    """Return the parameters of a module's forward that have names."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p for p in parameters if p.kind is not p.VAR_KEYWORD]


def cache_name_of(module: Any) -> str | None:
    """Return the name of the parameter whose type is that of a cache; None: there is none."""
    return next((p.name for p in parameters_of(module) if _takes_cache(p)), None)


def _takes_cache(parameter: inspect.Parameter) -> bool:
    return "Cache" in str(parameter.annotation)


def roles_of(module: Any) -> tuple[str, ...]:
    """Return the names of parameters, and CACHE for one whose type is that of a cache."""
    return tuple(CACHE if _takes_cache(p) else p.name for p in parameters_of(module))


def is_transformed() -> bool:
    """Tell whether torch.func, forward differentiation or a trace asks what an original does."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return not torch.compiler.is_compiling() and bool(torch._C._is_tracing())
