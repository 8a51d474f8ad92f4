"""Kernel of rotary position embedding: each half of a head is turned against the other.

    forward   y1 = x1 cos1 - x2 sin1    y2 = x2 cos2 + x1 sin2
    transpose y1 = x1 cos1 + x2 sin2    y2 = x2 cos2 - x1 sin1

Computed in float32 and rounded once. A program owns ROWS heads of tokens, heads first: those of one
token share its cosines in cache. One read of x, one write of y. Launched by rotary_launch.py.
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
    x_ptr, cos_ptr, sin_ptr, y_ptr, rows, heads, tokens,
    x_batch, x_head, x_token, y_batch, y_head, y_token, c_batch, c_head, c_token,
    SIZE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Turn the halves of x.

    x, y: [batch, heads, tokens, SIZE], any floating type; cos, sin: the same shape, of one stride,
    mostly 0. Strides count elements; the last ones are 1. rows = batch * heads * tokens.
    LANES: the power of two from SIZE / 2.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, token, batch = row % heads, (row // heads) % tokens, row // heads // tokens
    lane = tl.arange(0, LANES)[None, :]
    inside = (row < rows)[:, None]
    if LANES > SIZE // 2:
        inside = inside & (lane < SIZE // 2)
    x = x_ptr + (batch * x_batch + head * x_head + token * x_token)[:, None] + lane
    y = y_ptr + (batch * y_batch + head * y_head + token * y_token)[:, None] + lane
    angle = (batch * c_batch + head * c_head + token * c_token)[:, None] + lane
    first = tl.load(x, inside, 0).to(tl.float32)
    second = tl.load(x + SIZE // 2, inside, 0).to(tl.float32)
    cos1 = tl.load(cos_ptr + angle, inside, 0).to(tl.float32)
    cos2 = tl.load(cos_ptr + angle + SIZE // 2, inside, 0).to(tl.float32)
    sin1 = tl.load(sin_ptr + angle, inside, 0).to(tl.float32)
    sin2 = tl.load(sin_ptr + angle + SIZE // 2, inside, 0).to(tl.float32)
    sin_of_first, sin_of_second = sines(sin1, sin2, TRANSPOSED)
    y1 = first * cos1 - second * sin_of_second
    y2 = second * cos2 + first * sin_of_first
    tl.store(y, y1.to(y_ptr.dtype.element_ty), inside)
    tl.store(y + SIZE // 2, y2.to(y_ptr.dtype.element_ty), inside)
