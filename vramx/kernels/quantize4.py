"""Device functions that pack a tile to two codes a byte, and unpack one, as tiles.py at 8 bits.

A byte holds elements j and j + GROUP/2 of a group, so a tile is read as two halves that meet byte
by byte in one thread's registers: nothing is shuffled. Two codes share a register, 16 bits each,
from where noise is added to where bytes are made.

Stochastic rounding is code = floor((p + b) / 256): p is 256 times the quotient, rounded, and b the
byte of noise of this code, noise_bytes of vramx/compression/codec/reference.py says which.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.headers import (
    asymmetric_header,
    decode,
    header_pointer,
    load_scale,
    magnitude_key,
    symmetric_header,
)
from vramx.kernels.noise import code_bits, fixed_point_bits, noise_words


@triton.jit
def load_halves(x_ptr, left, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """Return the first and the second half of ROWS groups: fp32[ROWS, GROUP / 2] each."""
    HALF: tl.constexpr = GROUP // 2
    offsets = tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    # Beyond the end the last element is repeated: it changes no minimum and no maximum.
    source_a = tl.minimum(offsets, left - 1) if MASKED else offsets
    source_b = tl.minimum(offsets + HALF, left - 1) if MASKED else offsets + HALF
    return tl.load(x_ptr + source_a).to(tl.float32), tl.load(x_ptr + source_b).to(tl.float32)


@triton.jit
def store_halves(x_ptr, a, b, left, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """Write halves in the type of x_ptr, which points to the first element."""
    HALF: tl.constexpr = GROUP // 2
    offsets = tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tl.store(x_ptr + offsets, a.to(dtype), mask=offsets < left if MASKED else None)
    tl.store(x_ptr + HALF + offsets, b.to(dtype), mask=offsets + HALF < left if MASKED else None)


@triton.jit
def pack_halves(
    a, b, buffer_ptr, seed_ptr, stream, numel, first, left,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Write the codes and headers of groups that load_halves() returned.

    The first element of them is `first` (int64) of numel. Arguments as tiles.pack_tile's.
    """
    HALF: tl.constexpr = GROUP // 2
    rows = tl.arange(0, ROWS)
    places = rows[:, None] * HALF + tl.arange(0, HALF)[None, :]
    offsets = rows[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    filled = rows * GROUP < left if MASKED else None
    header_ptr = header_pointer(buffer_ptr, numel, first, GROUP, 4, SYMMETRIC)
    codes_ptr = buffer_ptr + first // 2
    if SYMMETRIC:
        largest = tl.max(tl.maximum(magnitude_key(a), magnitude_key(b)), 1)
        scale, inverse = symmetric_header(largest, 7)
        tl.store(header_ptr + rows, (scale >> 16).to(tl.int16), mask=filled)
    else:
        signed_a, signed_b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
        unsigned_a, unsigned_b = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
        scale, inverse, low = asymmetric_header(
            tl.max(tl.maximum(signed_a, signed_b), 1),
            tl.max(tl.maximum(unsigned_a, unsigned_b), 1),
            tl.min(tl.minimum(unsigned_a, unsigned_b), 1),
            15,
        )
        tl.store(header_ptr + rows, (scale >> 16) | low, mask=filled)
        low = low.to(tl.float32, bitcast=True)[:, None]
        a, b = a - low, b - low
    a, b = a * inverse[:, None], b * inverse[:, None]
    if STOCHASTIC:
        # Of positive numbers: what is carried out of one would change its neighbour in a register.
        bits_a, bits_b = fixed_point_bits(a, 16), fixed_point_bits(b, 16)
    else:
        bits_a, bits_b = code_bits(a), code_bits(b)
    if MASKED:
        bits_a = tl.where(offsets < left, bits_a, 0)
        bits_b = tl.where(offsets + HALF < left, bits_b, 0)
    lanes_a, lanes_b = _lanes(bits_a, ROWS, HALF), _lanes(bits_b, ROWS, HALF)
    FRACTION: tl.constexpr = 8 if STOCHASTIC else 0  # bits below a code
    if STOCHASTIC:
        # A word is for four codes, in the order in which they lie in two bytes.
        words = noise_words(seed_ptr, stream, first // 16, ROWS, HALF // 2, 2).to(tl.int32)
        lanes_a += words & 0x00FF00FF
        lanes_b += (words >> 8) & 0x00FF00FF
    pairs = (lanes_a & 0x0F0F0F0F) | ((lanes_b << 4) & -0x0F0F0F10)
    codes = tl.join(pairs >> FRACTION, pairs >> (16 + FRACTION))
    codes = tl.reshape(codes, (ROWS, HALF)).to(tl.uint8)
    if MASKED:
        tl.store(codes_ptr + places, codes, mask=(rows * GROUP < left)[:, None])
    else:
        tl.store(codes_ptr + places, codes)


@triton.jit
def _lanes(bits, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Return words of the low 16 bits of two neighbours: int32[ROWS, HALF / 2]."""
    even, odd = tl.split(tl.reshape(bits, (ROWS, HALF // 2, 2)))
    return (even & 0xFFFF) | (odd << 16)


@triton.jit
def unpack_halves(
    buffer_ptr, numel, first, left,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return what pack_halves() wrote, as load_halves() does; any numbers beyond the end."""
    HALF: tl.constexpr = GROUP // 2
    rows = tl.arange(0, ROWS)
    places = rows[:, None] * HALF + tl.arange(0, HALF)[None, :]
    offsets = rows[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    filled = rows * GROUP < left if MASKED else None
    pairs = tl.load(buffer_ptr + first // 2 + places, mask=offsets < left if MASKED else None)
    if SYMMETRIC:
        # The sign of a half byte: its code moves to the upper half, and the shift back repeats it.
        code_a = (pairs << 4).to(tl.int8, bitcast=True) >> 4
        code_b = pairs.to(tl.int8, bitcast=True) >> 4
    else:
        code_a, code_b = pairs & 15, pairs >> 4
    header_ptr = header_pointer(buffer_ptr, numel, first, GROUP, 4, SYMMETRIC)
    scale, low = load_scale(header_ptr + rows, filled, SYMMETRIC)
    scale, low = scale[:, None], low[:, None]
    a = decode(code_a.to(tl.float32), scale, low, SYMMETRIC)
    return a, decode(code_b.to(tl.float32), scale, low, SYMMETRIC)
