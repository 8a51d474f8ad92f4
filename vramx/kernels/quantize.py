"""Quantise to one byte an element, or to two codes a byte, and back.

A program owns ROWS groups, one tile: ROWS * GROUP elements, their codes and their headers (see
layout.py). No two programs share a byte. Tiles are taken from the end: that end of a tensor which
was just written is likelier in the L2 cache, and the one short tile, the only one that checks
bounds, does not come last. All others read and write 16 bytes a thread.
One pass: n * (element size + BITS / 8) bytes of memory traffic, and a header a group.

    symmetric    scale = up(max|x| * (1 + 2**-20) / L)           code = round(x / scale), int8
                 L = 7, or 126 of all but the two outliers, which are kept as bfloat16 and have
                 codes of their own
    asymmetric   low = down(min x), scale = up((max x - low) * (1 + 2**-20) / L)
                 code = round((x - low) / scale), uint8; L = 255 or 15
    decoded      code * scale, or code * scale + low

up and down round to bfloat16. A group with NaN or Inf gets a NaN scale: it decodes to NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.headers import narrow
from vramx.kernels.quantize4 import load_halves, pack_halves, store_halves, unpack_halves
from vramx.kernels.tiles import load_tile, pack_tile, store_tile, unpack_tile


@triton.jit(do_not_specialize=["numel", "stream"])
def quantize_kernel(
    x_ptr, buffer_ptr, seed_ptr, numel: tl.int64, stream: tl.int64,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write the codes and headers of a flat tensor.

    x_ptr: bf16, fp16 or fp32 [numel]. buffer_ptr: uint8 [Layout.buffer_bytes], 16-byte aligned.
    seed_ptr: int64 [2], seed and epoch; any pointer unless STOCHASTIC. numel: > 0. BITS: 8 or 4.
    TAIL_ROWS: groups of a short tile that are done at once; a quarter of ROWS keeps the registers
    that checked accesses take below those of a full tile.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _quantize_tile(
            x_ptr, buffer_ptr, seed_ptr, stream, numel, first, left,
            BITS, GROUP, ROWS, SYMMETRIC, STOCHASTIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _quantize_tile(
                x_ptr, buffer_ptr, seed_ptr, stream, numel, first + row * GROUP,
                left - row * GROUP, BITS, GROUP, TAIL_ROWS, SYMMETRIC, STOCHASTIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _quantize_tile(
    x_ptr, buffer_ptr, seed_ptr, stream, numel, first, left,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do ROWS groups, of which `left` elements are to be done."""
    if BITS == 8:
        x = load_tile(x_ptr + first, left, ROWS, GROUP, MASKED)
        pack_tile(
            x, buffer_ptr, seed_ptr, stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip
    else:
        a, b = load_halves(x_ptr + first, left, ROWS, GROUP, MASKED)
        pack_halves(
            a, b, buffer_ptr, seed_ptr, stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel"])
def dequantize_kernel(
    buffer_ptr, out_ptr, numel: tl.int64,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Write the elements of a packed buffer.

    buffer_ptr: uint8 [Layout.buffer_bytes], 16-byte aligned. out_ptr: bf16, fp16 or fp32 [numel].
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _dequantize_tile(
            buffer_ptr, out_ptr, numel, first, left, BITS, GROUP, ROWS, SYMMETRIC, False
        )
    else:
        row = 0
        while row * GROUP < left:
            _dequantize_tile(
                buffer_ptr, out_ptr, numel, first + row * GROUP, left - row * GROUP,
                BITS, GROUP, TAIL_ROWS, SYMMETRIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _dequantize_tile(
    buffer_ptr, out_ptr, numel, first, left,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Do ROWS groups, of which `left` elements are to be done."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BITS == 8:
        x = unpack_tile(buffer_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
        store_tile(out_ptr + first, narrow(x, dtype), left, ROWS, GROUP, MASKED)
    else:
        a, b = unpack_halves(buffer_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
        store_halves(out_ptr + first, narrow(a, dtype), narrow(b, dtype), left, ROWS, GROUP, MASKED)
