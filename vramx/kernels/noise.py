"""Device functions for rounding: to the nearest integer, and the noise that makes it stochastic.

Each is inlined into its kernel. The noise is a function of a seed and an epoch in device memory, a
stream, and the number of the element: no state, so any program makes its part, and a CUDA graph
that is replayed draws anew when the epoch was advanced in it. Conversions between integers and
floats are done by setting exponent bits: the unit for conversions is several times slower.
A code takes 8 bits of noise: codec.py derives what that does to a mean.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_bits(quotient):
    """Round fp32 in (-2**22, 2**22) half to even; return an int32 whose low bits are the integer.

    Adding 1.5 * 2**23 leaves no bit below one in the mantissa: the addition does the rounding, and
    the low bits of the sum are the integer in two's complement.
    """
    return (quotient + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def fixed_point_bits(quotient, ZERO: tl.constexpr):
    """Return 256 * (quotient + ZERO), rounded half to even, in the low 22 bits of an int32.

    In two's complement; the sum is of (-2**13, 2**13). As code_bits, with a sum whose lowest bit is
    worth 2**-8: 1.5 * 2**15.
    """
    return (quotient + (49152.0 + ZERO)).to(tl.int32, bitcast=True)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of Philox 4x32 with 7 rounds, all uint32.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11, which found 7
    rounds to be the fewest that pass BigCrush.
    """
    for _ in tl.static_range(7):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_2 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_2.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def noise_words(
    seed_ptr, stream, block, ROWS: tl.constexpr, COLS: tl.constexpr, SPAN: tl.constexpr
):
    """Return uint32[ROWS, COLS]: the words of ROWS * COLS / 4 blocks of a stream, in their order.

    seed_ptr: int64[2], seed and epoch. block: int64, the number of the first block; a multiple of
    ROWS * COLS / 4, a power of two. COLS: at least 4. SPAN: 1 or 2, blocks that follow each other
    and are made by one thread (1 if a row has no more): what it holds of a tile, so that the words
    do not change threads.
    """
    BLOCKS: tl.constexpr = SPAN if COLS >= 4 * SPAN else 1
    rows = tl.arange(0, ROWS)[:, None] * (COLS // 4)
    offsets = rows + tl.arange(0, COLS // (4 * BLOCKS))[None, :] * BLOCKS
    # No carry into the upper word: see what block must be.
    c0 = (block & 0xFFFFFFFF).to(tl.uint32) + offsets.to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = (block >> 32).to(tl.uint32) + zero
    c2 = stream.to(tl.uint32) + zero
    c3 = tl.load(seed_ptr + 1).to(tl.uint32) + zero
    seed = tl.load(seed_ptr)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, k0, k1)
    if BLOCKS == 2:
        v0, v1, v2, v3 = philox(c0 + 1, c1, c2, c3, k0, k1)
        w0, w1, w2, w3 = tl.join(w0, v0), tl.join(w1, v1), tl.join(w2, v2), tl.join(w3, v3)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, COLS))


@triton.jit
def noise_bytes(seed_ptr, stream, block, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return int32[ROWS, COLS], a random byte each: of element i, byte i % 4 of word i // 4.

    block: the number of the 16 elements that the tile begins with; the rows follow each other.
    Arguments as noise_words'.
    """
    words = noise_words(seed_ptr, stream, block, ROWS, COLS // 4, 1)
    even = tl.join(words & 0xFF, (words >> 16) & 0xFF)
    odd = tl.join((words >> 8) & 0xFF, words >> 24)
    return tl.reshape(tl.join(even, odd), (ROWS, COLS)).to(tl.int32)
