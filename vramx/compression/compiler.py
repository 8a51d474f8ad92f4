"""Have torch.compile leave our functions to the interpreter.

Does what torch._dynamo.disable does, without the second that importing torch._dynamo takes, which a
program that compiles nothing should not pay. Marks functions when they are defined; no cost later,
but for a tenth of a microsecond a call with torch 2.6.
"""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any, TypeVar, cast

import torch

# What torch.compile says where it was told not to break a graph.
_REASON = (
    "compression starts here, and cannot start within a graph: put torch.compile inside of it (on "
    "the module or function whose call is compressed, or block by block), or drop fullgraph=True"
)
_frames: Any = torch._C._dynamo.eval_frame
# Before torch 2.7 a frame can be passed over, and those that it calls are compiled all the same.
_HAS_STRATEGIES = hasattr(_frames, "set_code_exec_strategy")
Function = TypeVar("Function", bound=Any)


def run_uncompiled(function: Function) -> Function:
    """Return a function of which neither itself nor what it calls is compiled: for our own work."""
    _refuse(function)
    skip_frames(function)
    if _HAS_STRATEGIES:
        return function

    @functools.wraps(function)
    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        before = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(before)

    skip_frames(uncompiled)
    return cast(Function, uncompiled)


def caller(frame: FrameType) -> FrameType | None:
    """Return the frame that called a function, which may be one that run_uncompiled returned."""
    above = frame.f_back
    if above is not None and above.f_globals is globals():
        return above.f_back
    return above


def compile_only_callees(function: Any) -> None:
    """Have what the function calls compiled, but not its own frame: for wrappers."""
    _refuse(function)
    _set_strategy(function, callees=True)


def skip_frames(function: Any) -> None:
    """Never compile the function when it runs by itself; a graph may still contain it."""
    _set_strategy(function, callees=False)


def _refuse(function: Any) -> None:
    """End a graph, or raise, where the function would be traced into it."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _REASON


def _set_strategy(function: Any, *, callees: bool) -> None:
    if _HAS_STRATEGIES:
        action = _frames._FrameAction
        strategy = _frames._FrameExecStrategy(
            action.SKIP, action.DEFAULT if callees else action.SKIP
        )
        _frames.set_code_exec_strategy(function.__code__, strategy)
    else:
        _frames.skip_code(function.__code__)
