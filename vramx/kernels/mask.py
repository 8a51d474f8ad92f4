"""Pack bools, or which elements are above zero, to bits, and back: bit k of byte j is element
8 j + k.

A program owns BYTES packed bytes and the 8 * BYTES elements they stand for, so no two programs
share a byte. A thread reads or writes the 8 elements of a byte at once. Of bools 1.125 bytes of
traffic an element.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["numel"])
def pack_mask_kernel(x_ptr, buffer_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write the bits of a flat tensor; bits beyond the last element are 0.

    x_ptr: uint8 [numel], each 0 or 1; or bf16, fp16 or fp32, of which a bit says whether an element
    is above zero, or NaN. buffer_ptr: uint8 [ceil(numel / 8)]. numel: > 0.
    """
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    x_ptr += first * 8
    buffer_ptr += first
    places = tl.arange(0, BYTES)
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    if left == BYTES * 8:
        tl.store(buffer_ptr + places, _bits(tl.load(x_ptr + offsets)))
    else:
        packed = _bits(tl.load(x_ptr + offsets, mask=offsets < left, other=0))
        tl.store(buffer_ptr + places, packed, mask=places * 8 < left)


@triton.jit
def _bits(x):
    """Return a byte a row of 8 elements."""
    # In float32: the interpreter of Triton 3.9 compares the bits of bfloat16.
    flags = x.to(tl.int32) if x.dtype == tl.uint8 else tl.where(x.to(tl.float32) <= 0.0, 0, 1)
    return tl.sum(flags << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit(do_not_specialize=["numel"])
def unpack_mask_kernel(buffer_ptr, out_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write 1 where a bit is set, else 0.

    buffer_ptr: uint8 [ceil(numel / 8)]. out_ptr: uint8, bf16, fp16 or fp32 [numel]. numel: > 0.
    """
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    out_ptr += first * 8
    buffer_ptr += first
    places = tl.arange(0, BYTES)
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if left == BYTES * 8:
        tl.store(out_ptr + offsets, _flags(tl.load(buffer_ptr + places), dtype))
    else:
        packed = tl.load(buffer_ptr + places, mask=places * 8 < left, other=0)
        tl.store(out_ptr + offsets, _flags(packed, dtype), mask=offsets < left)


@triton.jit
def _flags(packed, dtype: tl.constexpr):
    """Return a row of 8 elements a byte."""
    flags = (packed[:, None] >> tl.arange(0, 8).to(tl.uint8)[None, :]) & 1
    return flags if dtype == tl.uint8 else flags.to(tl.float32).to(dtype)
