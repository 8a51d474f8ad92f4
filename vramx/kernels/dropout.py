"""Dropout whose mask is a function of a key and the number of the element: no mask is kept.

    y = x * scale where the element's 16 random bits are below `kept`, else 0;  + residual if ADD

The bits are those of noise.py for the key, in place of seed and epoch, and stream 0. The same
kernel on dy gives dx. A program owns ROWS * COLS elements. Traffic an element in bf16: 4 bytes, 6
with a residual.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.noise import noise_words
from vramx.kernels.tiles import load_tile, store_tile


@triton.jit(do_not_specialize=["numel", "stream", "kept"])
def dropout_kernel(
    x_ptr, residual_ptr, y_ptr, key_ptr, numel: tl.int64, stream: tl.int64, kept: tl.int32,
    scale: tl.float32,
    ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr, COLS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write y.

    x_ptr, residual_ptr, y_ptr: bf16, fp16 or fp32 [numel]; residual_ptr: any pointer unless ADD.
    key_ptr: int64[2]. stream: 0. kept: of 65536 values of the bits, those that keep an element.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * COLS)
    left = tl.minimum(numel - first, ROWS * COLS).to(tl.int32)
    if left == ROWS * COLS:
        _dropout_tile(
            x_ptr, residual_ptr, y_ptr, key_ptr, stream, kept, scale, first, left,
            ROWS, COLS, ADD, False,
        )  # fmt: skip
    else:
        row = 0
        while row * COLS < left:
            _dropout_tile(
                x_ptr, residual_ptr, y_ptr, key_ptr, stream, kept, scale, first + row * COLS,
                left - row * COLS, TAIL_ROWS, COLS, ADD, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _dropout_tile(
    x_ptr, residual_ptr, y_ptr, key_ptr, stream, kept, scale, first, left,
    ROWS: tl.constexpr, COLS: tl.constexpr, ADD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    words = noise_words(key_ptr, stream, first // 8, ROWS, COLS // 2, 2)
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, COLS)).to(tl.int32)
    x = load_tile(x_ptr + first, left, ROWS, COLS, MASKED)
    y = tl.where(halves < kept, x * scale, 0.0)
    if ADD:
        y += load_tile(residual_ptr + first, left, ROWS, COLS, MASKED)
    store_tile(y_ptr + first, y, left, ROWS, COLS, MASKED)
