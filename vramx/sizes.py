"""Byte counts as people write them: "24GiB" to 25769803776 and back.

Each unit means what it says, as for GNU dd and head: GiB and G are 2**30 bytes, GB is 10**9, which
is 1.6 GiB less at 24. What is written back is in binary units. Pure functions, no state.
"""

from __future__ import annotations

import math
import re

from vramx.errors import InvalidValueError, brief

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_BINARY = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_UNITS = {
    "b": 1,
    **_BINARY,
    **{f"{letter}ib": factor for letter, factor in _BINARY.items()},
    **{f"{letter}b": int(1000**power) for power, letter in enumerate(_BINARY, 1)},
}
_NAMES = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_ACCEPTED = (
    "accepted are a number of bytes or a number with B, KiB, MiB, GiB or TiB, as in 24GiB; G is "
    "GiB, GB is 10**9 bytes, and so on"
)
# Beyond this a size is a mistake, and further on it would no longer fit the core's arithmetic.
_MAX_BYTES = 1 << 62


def parse_size(size: int | str) -> int:
    """Turn a size into bytes.

    Args:
        size: bytes, or text with a unit in any letter case: KiB or K for 1024 bytes, KB for
            1000, and so for M, G and T; a fraction of a byte is rounded down.

    Raises:
        InvalidValueError: the text has no such form, or the size is negative or above 2**62.

    Example:
        >>> parse_size("1.5KiB"), parse_size("1.5K"), parse_size("1.5KB")
        (1536, 1536, 1500)
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise InvalidValueError(f"size {brief(size)} is of type {type(size).__name__}; {_ACCEPTED}")
    size_bytes = size if isinstance(size, int) else _parse_text(size)
    if not 0 <= size_bytes <= _MAX_BYTES:
        raise InvalidValueError(f"size {size!r} is out of range; accepted are 0 to 4194304TiB")
    return size_bytes


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise InvalidValueError(f"size {text!r} is not understood; {_ACCEPTED}")
    whole, _, fraction = match[1].partition(".")
    if len(whole) > 20 or len(fraction) > 20:
        raise InvalidValueError(f"size {text[:40]!r} has too many digits; {_ACCEPTED}")
    # Integers throughout: a float would lose the low bits of a size above 8 PiB.
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * factor // scale


def format_size(size_bytes: float, digits: int = 2) -> str:
    """Write bytes with the largest binary unit that leaves at least one whole unit.

    Example:
        >>> format_size(25 * (1 << 30) // 2)
        '12.50 GiB'
    """
    magnitude = abs(size_bytes)
    for factor, name in _NAMES:
        if magnitude >= factor:
            return f"{size_bytes / factor:.{digits}f} {name}"
    return f"{math.floor(size_bytes)} B"


def format_gib(size_bytes: float) -> str:
    """Write bytes in GiB whatever their size, so that a column of them compares at a glance.

    Example:
        >>> format_gib(1 << 29)
        '0.500 GiB'
    """
    return f"{size_bytes / GIB:.3f} GiB"
