"""Have torch.compile leave our functions to the interpreter.

Does what torch._dynamo.disable does, without the second that importing torch._dynamo takes, which a
program that compiles nothing should not pay. Marks functions when they are defined; no cost later.
"""

from __future__ import annotations

from typing import Any

import torch

# What torch.compile says where it was told not to break a graph.
_REASON = (
    "compression starts here, and cannot start within a graph: put torch.compile inside of it (on "
    "the module or function whose call is compressed, or block by block), or drop fullgraph=True"
)


def run_uncompiled(function: Any) -> None:
    """Have neither the function nor what it calls compiled: for work of our own."""
    _refuse(function)
    skip_frames(function)


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
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(
            action.SKIP, action.DEFAULT if callees else action.SKIP
        )
        frames.set_code_exec_strategy(function.__code__, strategy)
    else:
        from torch._dynamo.eval_frame import skip_code

        skip_code(function.__code__)
