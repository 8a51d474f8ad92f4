"""What the kernels of RMSNorm and LayerNorm share: tiles of rows, and how what was kept is read.

A row of HIDDEN elements is GROUPS groups of GROUP: GROUPS is a power of two, and what of it lies
beyond HIDDEN is masked. A tile is ROWS rows, [ROWS * GROUPS, GROUP]; more than one row only where
HIDDEN = GROUPS * GROUP, so that they follow each other in memory. What is kept of a row is its
normalised form n (no weight, no bias) and one factor r = rstd: n either packed to 8 bits,
symmetric, in the bytes of quantize.py (PACKED), or in the type of the input. The kernels are in
norm_forward.py and norm_backward.py; here is pure device code without state, in float32. A packed
tile costs 1 + 6 / GROUP bytes an element to read, and a sum over rows one reduction in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.headers import (
    decode_with_outliers,
    header_pointer,
    load_outliers,
    outlier_pointer,
)


@triton.jit
def row_columns(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return int32[ROWS * GROUPS, GROUP]: the column of each element of a tile."""
    groups = tl.arange(0, ROWS * GROUPS) % GROUPS
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def row_offsets(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return int32[ROWS * GROUPS, GROUP]: how far from the first element of a tile each lies."""
    return tl.arange(0, ROWS * GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def offsets_by_8(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return row_offsets(), of which the compiler knows 8 in a row: a thread then has 8 of them.

    So many halves are the 16 bytes that it has of them: codes that it has 16 of in a row would be
    passed on to other threads, through shared memory and two barriers.
    """
    lanes = tl.arange(0, GROUP)
    lanes = lanes // 8 * 8 + lanes % 8
    return tl.arange(0, ROWS * GROUPS)[:, None] * GROUP + lanes[None, :]


@triton.jit
def is_inside(
    left, HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the mask of a tile of which `left` rows exist; True where nothing is masked."""
    # No function returns None before Triton 3.7; a mask that is all ones costs nothing.
    if ROWS > 1:
        return (tl.arange(0, ROWS * GROUPS) < left * GROUPS)[:, None]
    elif HIDDEN != GROUPS * GROUP:  # noqa: RET505 - the compiler types what it sees
        return row_offsets(GROUP, GROUPS, ROWS) < HIDDEN
    else:
        return tl.full((ROWS * GROUPS, 1), 1, tl.int1)


@triton.jit
def is_filled(
    left, HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the mask of a tile's groups; HIDDEN is a multiple of GROUP."""
    groups = tl.arange(0, ROWS * GROUPS)
    if ROWS > 1:
        return groups < left * GROUPS
    else:  # noqa: RET505 - the compiler types what it sees
        return groups * GROUP < HIDDEN


@triton.jit
def load_rows(pointers, inside):
    """Return what lies there as fp32, 0 outside."""
    if inside is None:
        return tl.load(pointers).to(tl.float32)
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def row_totals(tile, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return fp32[ROWS], the sum of each row of a tile, or of the one row a scalar."""
    if ROWS == 1:  # which every thread then has, and nothing is spread through shared memory
        return tl.sum(tile)
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.sum(tl.reshape(tl.sum(tile, 1), (ROWS, GROUPS)), 1)


@triton.jit
def _add_two(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def row_totals_of_two(a, b, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return row_totals() of two tiles, which wait for each other's threads together."""
    if ROWS == 1:
        shape: tl.constexpr = (GROUPS * a.shape[1],)
        a = tl.reshape(a, shape, can_reorder=True)
        b = tl.reshape(b, shape, can_reorder=True)
        return tl.reduce((a, b), 0, _add_two)
    else:  # noqa: RET505 - the compiler types what it sees
        a = tl.reshape(a, (ROWS, GROUPS * a.shape[1]))
        b = tl.reshape(b, (ROWS, GROUPS * b.shape[1]))
        return tl.reduce((a, b), 1, _add_two)


@triton.jit
def spread(values, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return a value of each row as what multiplies a tile by rows; of one row it is a scalar."""
    if ROWS == 1:
        return values
    else:  # noqa: RET505 - the compiler types what it sees
        wide = tl.broadcast_to(values[:, None], (ROWS, GROUPS))
        return tl.reshape(wide, (ROWS * GROUPS,))[:, None]


@triton.jit
def load_normalised(
    kept_ptr, rows, first, offsets, inside, left,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Return n of a tile as fp32, 0 outside, of what was kept of it."""
    kept = tl.load(kept_ptr + first + offsets, mask=inside, other=0)
    if PACKED:
        filled = is_filled(left, HIDDEN, GROUP, GROUPS, ROWS)
        scale = _load_scales(kept_ptr, rows, first, filled, HIDDEN, GROUP, ROWS * GROUPS)
        outlier_ptr = outlier_pointer(kept_ptr, rows * HIDDEN, first, GROUP)
        outlier, second = load_outliers(outlier_ptr + tl.arange(0, ROWS * GROUPS), filled)
        codes = kept.to(tl.int8, bitcast=True)
        return decode_with_outliers(codes, scale[:, None], outlier[:, None], second[:, None])
    else:  # noqa: RET505 - the compiler types what it sees
        return kept.to(tl.float32)


@triton.jit
def _load_scales(
    kept_ptr, rows, first, filled,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return fp32[TILE_GROUPS], the scales of a tile's groups.

    They are read in words of two: copies to shared memory that a program does not wait for have
    four bytes or more. The last word may end two bytes behind the buffer, in the same four bytes.
    """
    header_ptr = header_pointer(kept_ptr, rows * HIDDEN, 0, GROUP, 8, True)
    begin = first // GROUP
    groups = tl.arange(0, TILE_GROUPS)
    if HIDDEN // GROUP % 2 == 1:
        groups += (begin % 2).to(tl.int32)
    words_ptr = header_ptr.to(tl.pointer_type(tl.int32)) + begin // 2
    # Not any number outside: its product with 0 may be NaN.
    words = tl.load(words_ptr + groups // 2, mask=filled, other=0)
    bits = tl.where(groups % 2 == 0, words << 16, words & -0x10000)
    return bits.to(tl.float32, bitcast=True)
