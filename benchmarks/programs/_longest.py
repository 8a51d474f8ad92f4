"""The longest sequence that fits: which length to try next, after those that were tried.

A step's peak grows in proportion to its length, and so two lengths that fit tell where the limit
should be; what is tried near it takes minutes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# So much longer is what follows the first length, and at most what follows two.
SHORT_STEP, LONG_STEP = 1.5, 6.0
# Of the limit, what the line should reach; of a length, what is not worth another step; and of one
# that did not fit, because the allocator wastes some, what may.
FULL, ALIKE, LESS = 0.985, 0.02, 0.93
MULTIPLE = 32


class Tried(NamedTuple):
    """A step of a length that fits, or not. `peak_bytes` is None where memory is not counted."""

    length: int
    ms: float
    peak_bytes: int | None
    fits: bool


def next_length(
    tried: Sequence[Tried], limit_bytes: int, longest: int, most_ms: float, power: int
) -> int | None:
    """Return the length to try next; None: the longest that fits is known well enough.

    Args:
        tried: in order; the first one fits.
        longest: no length is above it.
        most_ms: no step is begun that should take longer; it grows with this `power` of the length.
    """
    fitting = sorted(each for each in tried if each.fits)
    last = fitting[-1]
    bound = min(longest, last.length * (most_ms / last.ms) ** (1 / power))
    length = _by_line(fitting, limit_bytes)
    failed = min((each.length for each in tried if not each.fits), default=None)
    if failed is not None:
        bound = min(bound, max(LESS * failed, (last.length + failed) / 2))
    found = int(min(length, bound)) // MULTIPLE * MULTIPLE
    return found if found > (1 + ALIKE) * last.length else None


def _by_line(fitting: Sequence[Tried], limit_bytes: int) -> float:
    last = fitting[-1]
    before = fitting[-2] if len(fitting) > 1 else None
    if before is None or before.peak_bytes is None or last.peak_bytes is None:
        return last.length * SHORT_STEP
    slope = (last.peak_bytes - before.peak_bytes) / (last.length - before.length)
    if slope <= 0:  # as yet something else is the peak
        return last.length * LONG_STEP / 2
    left_bytes = FULL * limit_bytes - last.peak_bytes
    return min(last.length + left_bytes / slope, last.length * LONG_STEP)
