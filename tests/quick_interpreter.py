"""Spares Triton's interpreter two things that it does anew at every call, a quarter of its time.

It looks through the language for what to patch whenever a function is called, which takes a
millisecond, and builds a table of types whenever an operation asks for one. The language stays
patched: this is for a process that does nothing but interpret.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

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
