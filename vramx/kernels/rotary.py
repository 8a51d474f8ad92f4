"""Kernel of rotary position embedding: each half of a head is turned against the other.

    forward   y1 = x1 cos1 - x2 sin1    y2 = x2 cos2 + x1 sin2
    transpose y1 = x1 cos1 + x2 sin2    y2 = x2 cos2 - x1 sin1

Computed in float32 and rounded once. A program owns STEPS blocks of HEADS heads of TOKENS tokens;
a token's heads share its cosines, which are read once for all blocks. One read of x, one write of
y. Launched by rotary_launch.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sines(sin1, sin2, TRANSPOSED: tl.constexpr):
    """Return what the first half has in the second of the result, and the second in the first."""
    if TRANSPOSED:
        return -sin1, -sin2
    return sin2, sin1


@triton.jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, heads, tokens,
    x_batch, x_head, x_token, y_batch, y_head, y_token, c_batch, c_head, c_token,
    SIZE: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    STEPS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Turn the halves of x.

    x, y: [batch, heads, tokens, SIZE], any floating type; cos, sin: the same shape, of one stride,
    mostly 0, and c_head is 0 if STEPS > 1. Strides count elements; the last ones are 1. LANES: the
    power of two from SIZE / 2. The grid is batch * ceil(tokens / TOKENS) * ceil(heads / HEADS /
    STEPS), heads first.
    """
    head_blocks = tl.cdiv(heads, HEADS * STEPS)
    token_blocks = tl.cdiv(tokens, TOKENS)
    block = tl.program_id(0) // head_blocks
    batch = (block // token_blocks).to(tl.int64)
    places = tl.arange(0, HEADS * TOKENS)
    head = (tl.program_id(0) % head_blocks) * (HEADS * STEPS) + places % HEADS
    token = (block % token_blocks) * TOKENS + places // HEADS
    lane = tl.arange(0, LANES)[None, :]
    known = (token < tokens)[:, None]
    if LANES > SIZE // 2:
        known = known & (lane < SIZE // 2)
    inside = known & (head < heads)[:, None]
    rows, columns = head.to(tl.int64), token.to(tl.int64)
    x = x_ptr + (batch * x_batch + rows * x_head + columns * x_token)[:, None] + lane
    y = y_ptr + (batch * y_batch + rows * y_head + columns * y_token)[:, None] + lane
    angle = (batch * c_batch + rows * c_head + columns * c_token)[:, None] + lane
    first = tl.load(x, inside, 0).to(tl.float32)
    second = tl.load(x + SIZE // 2, inside, 0).to(tl.float32)
    cos1 = tl.load(cos_ptr + angle, inside, 0).to(tl.float32)
    cos2 = tl.load(cos_ptr + angle + SIZE // 2, inside, 0).to(tl.float32)
    sin1 = tl.load(sin_ptr + angle, inside, 0).to(tl.float32)
    sin2 = tl.load(sin_ptr + angle + SIZE // 2, inside, 0).to(tl.float32)
    sin_of_first, sin_of_second = sines(sin1, sin2, TRANSPOSED)
    for step in tl.static_range(STEPS):
        y1 = first * cos1 - second * sin_of_second
        y2 = second * cos2 + first * sin_of_first
        stored = inside
        if step + 1 < STEPS:
            # Loads do not pass stores: those of the next block go first.
            inside = known & (head + (step + 1) * HEADS < heads)[:, None]
            # Eight heads of a million tokens are more elements than an int32 counts.
            x += tl.full((), HEADS, tl.int64) * x_head
            first = tl.load(x, inside, 0).to(tl.float32)
            second = tl.load(x + SIZE // 2, inside, 0).to(tl.float32)
        tl.store(y, y1.to(y_ptr.dtype.element_ty), stored)
        tl.store(y + SIZE // 2, y2.to(y_ptr.dtype.element_ty), stored)
        y += tl.full((), HEADS, tl.int64) * y_head
