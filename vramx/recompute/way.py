"""Which way a call took through the code that it ran: where in it something was saved for backward.

What was seen of a call holds for others that took the same way, whatever decided about it: a
function that was defined again, a part that was replaced, an attribute, a branch. What saves
nothing, and has no gradient, is not seen; a recomputation that meets it is watched (region.py).
Before torch 2.8, which does not tell of hooks, all ways are the same. Belongs to one call. A saved
tensor costs a third of a microsecond, and a way some more.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor

from vramx.compression import enclosing
from vramx.compression.compiler import run_uncompiled
from vramx.recompute.verdicts import Way
from vramx.recompute.watch import Reads

# The function of a mode stands between an operation and what calls it while a call is watched.
_OF_MODE = Reads.__torch_function__.__code__


class Steps:
    """Where a call saves tensors."""

    def __init__(self) -> None:
        self._codes: list[CodeType] = []
        self._places: list[int] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what the hooks of a checkpoint are given meanwhile."""
        hooks = enclosing.top_hooks()
        if hooks is None:
            yield
            return
        pack, unpack = hooks
        with enclosing.Hooks(_Noting(self, pack), unpack):
            yield

    def note(self) -> None:
        """Note the frame that called the operation which saves."""
        frame = sys._getframe(1).f_back
        if frame is None:  # of a device's backward thread, which takes a gradient of a gradient
            return
        if frame.f_code is _OF_MODE and frame.f_back is not None:
            frame = frame.f_back
        self._codes.append(frame.f_code)
        self._places.append(frame.f_lasti)

    def way(self) -> Way:
        """Return the way, and forget it. Of a loop it does not matter how often it went round."""
        codes, places = self._codes, self._places
        self._codes, self._places = [], []
        number = hash(frozenset(zip(map(id, codes), places, strict=True)))
        return Way(number, tuple({id(code): code for code in codes}.values()))


class _Noting:
    """A hook around that of a checkpoint. Is taken for torch's own by its name."""

    __qualname__ = f"{enclosing.FORWARD_HOOK}noting"

    def __init__(self, steps: Steps, pack: Callable[[Tensor], Any]) -> None:
        self._steps = steps
        self._pack = pack

    @run_uncompiled
    def __call__(self, tensor: Tensor) -> Any:
        self._steps.note()
        return self._pack(tensor)
