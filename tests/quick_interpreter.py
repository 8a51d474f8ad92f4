"""Spares Triton's interpreter three things, half of its time.

It looks through the language for what to patch whenever a function is called, which takes a
millisecond; builds a table of types whenever an operation asks for one; and reduces with a function
that is not its own element after element. The language stays patched: this is for a process that
does nothing but interpret.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Change the interpreter of this process, in which Triton must interpret."""
    patch = cache(interpreter._patch_lang)

    def patch_first(function: Any) -> Any:
        patch(function)
        return SimpleNamespace(restore=lambda: None)

    of_type = interpreter._get_np_dtype
    of_name: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        if isinstance(kind.scalar, tl.pointer_type):
            return of_type(kind)
        if kind.scalar.name not in of_name:
            of_name[kind.scalar.name] = of_type(kind)
        return of_name[kind.scalar.name]

    interpreter._patch_lang = patch_first
    interpreter._get_np_dtype = numpy_type
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves


def _reduce_by_halves(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
    """Combine the halves of a block until one element is left, in an order that a GPU may take."""
    assert self.axis is not None, "no kernel reduces over all axes with a function of its own"
    axis = self.axis % len(tensors[0].shape)
    kinds = [tensor.dtype for tensor in tensors]
    parts = [tensor.handle.data for tensor in tensors]
    while parts[0].shape[axis] > 1:
        halves = zip(*(np.split(part, 2, axis) for part in parts), strict=True)
        low, high = (map(self.to_tensor, half, kinds) for half in halves)
        combined = self.combine_fn.fn(*low, *high)
        combined = combined if isinstance(combined, tuple) else (combined,)
        parts = [tensor.handle.data for tensor in combined]
    if not self.keep_dims:
        parts = [part.squeeze(axis) for part in parts]
    return [self.to_tensor(*each) for each in zip(parts, kinds, strict=True)]
