"""Which way a call took through the code that it ran: where in it something was saved for backward.

What was seen of a call holds for others that took the same way, whatever decided about it: a
function that was defined again, a part that was replaced, an attribute, a branch. What saves
nothing, and has no gradient, is not seen; a recomputation that meets it is watched (region.py).
Belongs to one call. A saved tensor costs a fifth of a microsecond, and a way some more.
"""

from __future__ import annotations

from types import CodeType, FrameType

from vramx.recompute.verdicts import Way
from vramx.recompute.watch import Reads

# The function of a mode stands between an operation and what calls it while a call is watched.
_OF_MODE = Reads.__torch_function__.__code__


class Steps:
    """Where a call saves tensors."""

    def __init__(self) -> None:
        self.codes: list[CodeType] = []
        self.places: list[int] = []

    def note(self, frame: FrameType) -> None:
        """Note the frame that called the operation which saves."""
        code = frame.f_code
        if code is _OF_MODE and frame.f_back is not None:
            frame = frame.f_back
            code = frame.f_code
        self.codes.append(code)
        self.places.append(frame.f_lasti)


def way_of(steps: Steps | None) -> Way:
    """Return the way of a call; of those without steps it is the same.

    Of a loop it does not matter how often it went round.
    """
    if steps is None:
        return Way(0, ())
    number = hash(frozenset(zip(map(id, steps.codes), steps.places, strict=True)))
    return Way(number, tuple({id(code): code for code in steps.codes}.values()))
