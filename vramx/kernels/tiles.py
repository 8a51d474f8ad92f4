"""Device functions that pack a tile which is in registers, and unpack one into registers.

For kernels that compute what they keep: ROWS groups of GROUP elements in flat order, 8 bits, with
the bytes that quantize.py would write for the same values and the same noise. The callers' tiles
follow each other; one that is not full is MASKED, and what it loads beyond its end is its last
element once more, which changes no minimum and no maximum. Pure device code; nothing is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.headers import (
    asymmetric_header,
    decode,
    decode_with_outliers,
    header_pointer,
    load_outliers,
    load_scale,
    mark_outliers,
    outlier_header,
    outlier_pointer,
    signed_key,
)
from vramx.kernels.noise import code_bits, fixed_point_bits, noise_bytes


@triton.jit
def tile_offsets(ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return int32[ROWS, GROUP]: the places of a tile's elements, counted from its first."""
    return tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def load_tile(x_ptr, left, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """Return fp32[ROWS, GROUP] from a pointer to the tile's first element."""
    offsets = tile_offsets(ROWS, GROUP)
    source = tl.minimum(offsets, left - 1) if MASKED else offsets
    return tl.load(x_ptr + source).to(tl.float32)


@triton.jit
def store_tile(x_ptr, x, left, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """Write fp32[ROWS, GROUP] in the type of x_ptr, which points to the tile's first element."""
    offsets = tile_offsets(ROWS, GROUP)
    inside = offsets < left if MASKED else None
    tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def pack_tile(
    x, buffer_ptr, seed_ptr, stream, numel, first, left,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Write the codes and headers of the tile that begins with element `first` (int64) of numel.

    x: fp32[ROWS, GROUP]. buffer_ptr: uint8 [Layout.buffer_bytes] of the whole tensor. seed_ptr:
    int64[2]; any pointer unless STOCHASTIC. left: elements that are to be written, if MASKED.
    """
    inside = tile_offsets(ROWS, GROUP) < left if MASKED else None
    filled = tl.arange(0, ROWS) * GROUP < left if MASKED else None
    pack_groups(
        x, buffer_ptr, seed_ptr, stream, numel, first, inside, filled,
        ROWS, GROUP, SYMMETRIC, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def pack_groups(
    x, buffer_ptr, seed_ptr, stream, numel, first, inside, filled,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write the codes and headers of a tile.

    inside, filled: the masks of the elements whose codes are not 0, and of the groups that are
    written, or None. Others as pack_tile's.
    """
    rows = tl.arange(0, ROWS)
    header_ptr = header_pointer(buffer_ptr, numel, first, GROUP, 8, SYMMETRIC)
    if SYMMETRIC:
        key = signed_key(x)
        second, word, scale, inverse = outlier_header(key)
        tl.store(outlier_pointer(buffer_ptr, numel, first, GROUP) + rows, word, mask=filled)
        tl.store(header_ptr + rows, (scale >> 16).to(tl.int16), mask=filled)
    else:
        signed = x.to(tl.int32, bitcast=True)
        unsigned = x.to(tl.uint32, bitcast=True)
        scale, inverse, low = asymmetric_header(
            tl.max(signed, 1), tl.max(unsigned, 1), tl.min(unsigned, 1), 255
        )
        tl.store(header_ptr + rows, (scale >> 16) | low, mask=filled)
        x = x - low.to(tl.float32, bitcast=True)[:, None]
    quotient = x * inverse[:, None]
    if STOCHASTIC:
        noise = noise_bytes(seed_ptr, stream, first // 16, ROWS, GROUP)
        codes = (fixed_point_bits(quotient, 0) + noise) >> 8
    else:
        codes = code_bits(quotient)
    if SYMMETRIC:
        codes = mark_outliers(codes, key, second)
    if inside is not None:
        codes = tl.where(inside, codes, 0)
    mask = None if filled is None else filled[:, None]
    tl.store(buffer_ptr + first + tile_offsets(ROWS, GROUP), codes.to(tl.uint8), mask=mask)


@triton.jit
def unpack_tile(
    buffer_ptr, numel, first, left,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return fp32[ROWS, GROUP], what pack_tile wrote; what lies beyond the end is 0."""
    rows = tl.arange(0, ROWS)
    offsets = tile_offsets(ROWS, GROUP)
    inside = offsets < left if MASKED else None
    filled = rows * GROUP < left if MASKED else None
    codes = tl.load(buffer_ptr + first + offsets, mask=inside)
    return unpack_groups(codes, buffer_ptr, numel, first, rows, filled, GROUP, SYMMETRIC)


@triton.jit
def unpack_groups(
    codes, buffer_ptr, numel, first, groups, filled, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr
):
    """Return fp32 of uint8 codes, a row a group; 0 of code 0 where `filled` is given and not set.

    groups: int32, how many groups after that of element `first` (int64) each row's is.
    """
    header_ptr = header_pointer(buffer_ptr, numel, first, GROUP, 8, SYMMETRIC)
    scale, low = load_scale(header_ptr + groups, filled, SYMMETRIC)
    if SYMMETRIC:
        outlier_ptr = outlier_pointer(buffer_ptr, numel, first, GROUP)
        outlier, second = load_outliers(outlier_ptr + groups, filled)
        codes = codes.to(tl.int8, bitcast=True)
        return decode_with_outliers(codes, scale[:, None], outlier[:, None], second[:, None])
    else:  # noqa: RET505 - the compiler types what it sees: no dead return
        return decode(codes.to(tl.float32), scale[:, None], low[:, None], SYMMETRIC)
