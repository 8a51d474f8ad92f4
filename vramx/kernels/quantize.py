"""Quantise to one byte an element, and back.

A program owns ROWS groups, one tile: ROWS * GROUP elements, their codes and their headers (see
layout.py). No two programs share a byte. Tiles are taken from the end: that end of a tensor which
was just written is likelier in the L2 cache, and the one short tile, the only one that checks
bounds, does not come last. All others read and write 16 bytes a thread.
One pass: n * (element size + 1) bytes of memory traffic, and a header a group.

    symmetric    scale = up(max|x| * (1 + 2**-20) / 127)         code = round(x / scale), int8
    asymmetric   low = down(min x), scale = up((max x - low) * (1 + 2**-20) / 255)
                 code = round((x - low) / scale), uint8
    decoded      code * scale, or code * scale + low

up and down round to bfloat16. A group with NaN or Inf gets a NaN scale: it decodes to NaN.
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
    narrow,
    symmetric_header,
)
from vramx.kernels.noise import code_bits, rounding_noise


@triton.jit(do_not_specialize=["numel", "stream"])
def quantize_kernel(
    x_ptr,
    buffer_ptr,
    seed_ptr,
    numel: tl.int64,
    stream: tl.int64,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TAIL_ROWS: tl.constexpr,
):
    """Write the codes and headers of a flat tensor.

    x_ptr: bf16, fp16 or fp32 [numel]. buffer_ptr: uint8 [Layout.buffer_bytes], 16-byte aligned.
    seed_ptr: int64 [2], seed and epoch; any pointer unless STOCHASTIC. numel: > 0.
    TAIL_ROWS: groups of a short tile that are done at once; a quarter of ROWS keeps the registers
    that checked accesses take below those of a full tile.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    header_ptr = header_pointer(buffer_ptr, numel, first, GROUP, 8, SYMMETRIC)
    x_ptr += first
    codes_ptr = buffer_ptr + first
    if left == ROWS * GROUP:
        _quantize_tile(
            x_ptr, codes_ptr, header_ptr, seed_ptr, stream, first, left,
            GROUP, ROWS, SYMMETRIC, STOCHASTIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            at = row * GROUP
            _quantize_tile(
                x_ptr + at, codes_ptr + at, header_ptr + row, seed_ptr, stream, first + at,
                left - at, GROUP, TAIL_ROWS, SYMMETRIC, STOCHASTIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _quantize_tile(
    x_ptr,
    codes_ptr,
    header_ptr,
    seed_ptr,
    stream,
    first,
    left,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Do ROWS groups: all pointers are at the first element; `left` elements are to be done."""
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    filled = rows * GROUP < left if MASKED else None
    # Beyond the end the last element is repeated: it changes no minimum and no maximum.
    source = tl.minimum(offsets, left - 1) if MASKED else offsets
    x = tl.load(x_ptr + source).to(tl.float32)
    if SYMMETRIC:
        # Not greatest_magnitude(): with it Triton 3.6 keeps two words of float32 in local memory.
        scale, inverse = symmetric_header(tl.max(magnitude_key(x), 1), 127)
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
        quotient += rounding_noise(seed_ptr, stream, first // 8, ROWS, GROUP)
    codes = code_bits(quotient)
    if MASKED:
        codes = tl.where(offsets < left, codes, 0)
        tl.store(codes_ptr + offsets, codes.to(tl.uint8), mask=(rows * GROUP < left)[:, None])
    else:
        tl.store(codes_ptr + offsets, codes.to(tl.uint8))


@triton.jit(do_not_specialize=["numel"])
def dequantize_kernel(
    buffer_ptr,
    out_ptr,
    numel: tl.int64,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    TAIL_ROWS: tl.constexpr,
):
    """Write the elements of a packed buffer.

    buffer_ptr: uint8 [Layout.buffer_bytes], 16-byte aligned. out_ptr: bf16, fp16 or fp32 [numel].
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    header_ptr = header_pointer(buffer_ptr, numel, first, GROUP, 8, SYMMETRIC)
    codes_ptr = buffer_ptr + first
    out_ptr += first
    if left == ROWS * GROUP:
        _dequantize_tile(codes_ptr, header_ptr, out_ptr, left, GROUP, ROWS, SYMMETRIC, False)
    else:
        row = 0
        while row * GROUP < left:
            at = row * GROUP
            _dequantize_tile(
                codes_ptr + at, header_ptr + row, out_ptr + at, left - at,
                GROUP, TAIL_ROWS, SYMMETRIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _dequantize_tile(
    codes_ptr,
    header_ptr,
    out_ptr,
    left,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Do ROWS groups: all pointers are at the first element; `left` elements are to be done."""
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = offsets < left if MASKED else None
    filled = rows * GROUP < left if MASKED else None
    codes = tl.load(codes_ptr + offsets, mask=inside)
    if SYMMETRIC:
        codes = codes.to(tl.int8, bitcast=True)
    scale, low = load_scale(header_ptr, rows, filled, SYMMETRIC)
    x = decode(codes.to(tl.float32), scale[:, None], low[:, None], SYMMETRIC)
    tl.store(out_ptr + offsets, narrow(x, out_ptr.dtype.element_ty), mask=inside)
