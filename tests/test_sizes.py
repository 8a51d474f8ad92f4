"""Sizes in text and back: each unit means what it says, exact, one clear line for the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramx.errors import InvalidValueError
from vramx.sizes import format_gib, format_size, parse_size

SIZES = {
    0: "0",
    7: "7B",
    102: "0.1KiB",
    512: "512",
    1 << 10: "1KiB",
    1000: "1kB",
    1536: "1.5K",
    500_000: "0.5 MB",
    3 << 19: "1.5MiB",
    16 << 20: "16M",
    3 << 30: "3G|3g",
    24 * 10**9: "24GB|24gb",
    24 << 30: "24GiB|24gib| 24 GiB ",
    1 << 39: ".5TiB",
    10**12: "1TB",
    2 << 40: "2T",
    (1 << 53) + 1: "9007199254740993",  # which a float rounds
    1 << 62: "4194304TiB",
}


@pytest.mark.parametrize("size_bytes", SIZES)
def test_text_parses_to_bytes(size_bytes: int) -> None:
    for text in SIZES[size_bytes].split("|"):
        assert parse_size(text) == size_bytes
    assert parse_size(size_bytes) == size_bytes


UNITS = "KiB, MiB, GiB or TiB"
WRONG: list[tuple[object, str]] = [
    *((text, UNITS) for text in ("", "GiB", "24Gi", "24GBytes", "24P", "24 G B", "-1GiB")),
    *((text, UNITS) for text in ("1e9", "inf", "nan", "0x10", "1,5GiB", "٣GiB")),
    *((size, "out of range") for size in (-1, (1 << 62) + 1, "5000000TiB")),
    *((size, "of type") for size in (True, 1.5, None, b"1GiB")),
    ("9" * 100_000 + "GiB", "too many digits"),
]


@pytest.mark.parametrize(("size", "what"), WRONG, ids=lambda word: repr(word)[:20])
def test_other_sizes_are_refused(size: object, what: str) -> None:
    with pytest.raises(InvalidValueError, match=what):
        parse_size(size)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 62))
def test_formatted_size_parses_back_to_within_its_last_digit(size_bytes: int) -> None:
    text = format_size(size_bytes)
    unit_bytes = parse_size("1" + text.split()[1])
    # Two decimals: half of the last one, and the fraction of a byte that parsing drops.
    assert abs(parse_size(text) - size_bytes) <= 0.005 * unit_bytes + 1


def test_sizes_format_with_the_largest_whole_unit() -> None:
    shown = [format_size(n) for n in (0, 1023, 1024, (1 << 20) - 1, 3 << 29, 1 << 40)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "1024.00 KiB", "1.50 GiB", "1.00 TiB"]
    assert format_gib(1 << 20) == "0.001 GiB"
