"""Sizes in text and back: each unit means what it says, exact, one clear line for the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramx.errors import InvalidValueError
from vramx.sizes import format_gib, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("7B", 7),
        ("1KiB", 1 << 10),
        ("24GiB", 24 << 30),
        ("24gib", 24 << 30),
        (" 24 GiB ", 24 << 30),
        ("1.5MiB", 3 << 19),
        (".5TiB", 1 << 39),
        ("0.1KiB", 102),
        ("3G", 3 << 30),
        ("3g", 3 << 30),
        ("1.5K", 1536),
        ("16M", 16 << 20),
        ("2T", 2 << 40),
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1kB", 1000),
        ("0.5 MB", 500_000),
        ("1TB", 10**12),
        ("4194304TiB", 1 << 62),
    ],
)
def test_text_parses_to_bytes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


def test_an_int_is_bytes() -> None:
    assert parse_size(12345) == 12345


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "24Gi",
        "24GBytes",
        "24P",
        "24 G B",
        "-1GiB",
        "1e9",
        "inf",
        "nan",
        "0x10",
        "1,5GiB",
        "٣GiB",
    ],
)
def test_other_text_is_refused_and_the_units_named(text: str) -> None:
    with pytest.raises(InvalidValueError, match="KiB, MiB, GiB or TiB"):
        parse_size(text)


@pytest.mark.parametrize("size", [-1, (1 << 62) + 1, "5000000TiB"])
def test_sizes_out_of_range_are_refused(size: int | str) -> None:
    with pytest.raises(InvalidValueError, match="out of range"):
        parse_size(size)


@pytest.mark.parametrize("size", [True, 1.5, None, b"1GiB"])
def test_other_types_are_refused(size: object) -> None:
    with pytest.raises(InvalidValueError, match="of type"):
        parse_size(size)  # type: ignore[arg-type]


def test_a_long_string_of_digits_is_refused_quickly() -> None:
    with pytest.raises(InvalidValueError, match="too many digits"):
        parse_size("9" * 100_000 + "GiB")


def test_large_sizes_keep_their_low_bits() -> None:
    assert parse_size("9007199254740993") == 9007199254740993  # 2^53 + 1, which a float rounds


@given(st.integers(0, 1 << 62))
def test_formatted_size_parses_back_to_within_its_last_digit(size_bytes: int) -> None:
    text = format_size(size_bytes)
    unit_bytes = parse_size("1" + text.split()[1])
    # Two decimals: half of the last one, and the fraction of a byte that parsing drops.
    assert abs(parse_size(text) - size_bytes) <= 0.005 * unit_bytes + 1


def test_sizes_format_with_the_largest_whole_unit() -> None:
    shown = [format_size(n) for n in (0, 1023, 1024, (1 << 20) - 1, 3 << 29, 1 << 40)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "1024.00 KiB", "1.50 GiB", "1.00 TiB"]


def test_format_gib_keeps_the_unit() -> None:
    assert format_gib(1 << 20) == "0.001 GiB"
