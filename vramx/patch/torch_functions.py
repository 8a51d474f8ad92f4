"""Functions of torch that a program has put its own in the place of, and what those stand before.

Other attention, counters of operations and losses are assigned to torch.nn.functional, to a class
of torch.nn, or to Tensor. What vramx knows of an operation is known of torch's own alone, so that
where one was replaced the program's is called, as it was.

    F.cross_entropy(x, y)  ──►  the program's  ──►  torch's own, which it remembers  ──►  a mode,
                                                    which is told of "F.cross_entropy"

What torch tells a mode of is what now bears the name: called by that, the program's would run a
second time within itself. called() finds torch's own. Thread-safe; a look at names, or at frames
where the function is no library's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, TypeVar, cast

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "vramx_stands_for_torchs"
_BUILTINS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
# What modules of torch.nn that vramx computes itself call, beside attention and losses.
OF_MODULES = (
    *("linear", "gelu", "silu", "relu", "dropout", "layer_norm", "rms_norm", "group_norm"),
    *("batch_norm", "conv2d"),
)
# Replaced in C++ by nobody: what stands under this name is torch's own, whatever F has.
attention: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention


def is_own(function: Any, package: str) -> bool:
    """Tell whether a function is its package's own, decorated or not.

    Example:
        >>> is_own(torch.nn.Linear.forward, "torch"), is_own(is_own, "torch")
        (True, False)
    """
    known = isinstance(function, (FunctionType, *_BUILTINS))  # of any other object nothing is known
    return known and (hasattr(function, _MARK) or _is_of(function, package))


def stand_in(function: Function, name: str) -> Function:
    """Mark a function that does what torch's own of a name does, while a step is predicted."""
    function.__name__ = name
    setattr(function, _MARK, True)
    return function


def replaced(names: tuple[str, ...]) -> str | None:
    """Return the first of some names of torch.nn.functional that has another function now."""
    now: tuple[Any, ...] = tuple([getattr(functional, name) for name in names])
    if _found.get(names, (None, None))[0] != now:
        wrong = (
            name
            for name, function in zip(names, now, strict=True)
            if not (is_own(function, "torch") and function.__name__ == name)
        )
        _found[names] = now, next(wrong, None)
    return _found[names][1]


def called(function: Function, frame: FrameType | None) -> Function:
    """Return the function that runs, where a mode, or a tensor-like, was told of another by name.

    Args:
        function: what torch told of.
        frame: that which called __torch_function__().
    """
    if not isinstance(function, FunctionType) or is_own(function, "torch"):
        return function
    if frame is None or frame.f_code is not handle_torch_function.__code__:
        return cast(Function, _method_for(function))
    inner = frame.f_back
    module = "" if inner is None else str(inner.f_globals.get("__name__"))
    if inner is None or module.partition(".")[0] != "torch" or inner.f_code.co_freevars:
        return function  # another library's, which does with its functions as it likes
    return cast(Function, _function_of(inner.f_code, module))


_found: dict[tuple[str, ...], tuple[Any, str | None]] = {}


@lru_cache(maxsize=256)
def _function_of(code: CodeType, module: str) -> FunctionType:
    """Return a function of a module by its code; torch calls it with all of its arguments."""
    return FunctionType(code, vars(sys.modules[module]), code.co_name)


@lru_cache(maxsize=256)
def _method_for(function: Any) -> Any:
    """Return the method of tensors, written in C++, in whose place a function is, or that one."""
    name = next((name for name, value in vars(torch.Tensor).items() if value is function), "")
    return getattr(torch._C.TensorBase, name, function)


@lru_cache(maxsize=2048)
def _is_of(function: Any, package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    folder = "" if file is None else os.path.join(os.path.dirname(file), "")
    while isinstance(function, FunctionType):
        if not folder or not function.__code__.co_filename.startswith(folder):
            return False
        function = getattr(function, "__wrapped__", None)
    if function is None:
        return True
    # Methods written in C++ say no module.
    module = getattr(function, "__module__", None) or package
    return isinstance(function, _BUILTINS) and module.partition(".")[0] == package
