"""Pack bools, or which elements are above zero, to bits, and back: bit k of byte j is element
8 j + k.

A program owns BYTES packed bytes and the 8 * BYTES bools they stand for, so no two programs share a
byte. A thread reads or writes the 8 bools of a byte at once. 1.125 bytes of traffic an element.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["numel"])
def pack_mask_kernel(flags_ptr, buffer_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write the bits of a flat tensor of bools; bits beyond the last element are 0.

    flags_ptr: uint8 [numel], each 0 or 1. buffer_ptr: uint8 [ceil(numel / 8)]. numel: > 0.
    """
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    flags_ptr += first * 8
    buffer_ptr += first
    places = tl.arange(0, BYTES)
    bits = tl.arange(0, 8)
    offsets = places[:, None] * 8 + bits[None, :]
    if left == BYTES * 8:
        flags = tl.load(flags_ptr + offsets).to(tl.int32)
        tl.store(buffer_ptr + places, tl.sum(flags << bits[None, :], 1).to(tl.uint8))
    else:
        flags = tl.load(flags_ptr + offsets, mask=offsets < left, other=0).to(tl.int32)
        packed = tl.sum(flags << bits[None, :], 1).to(tl.uint8)
        tl.store(buffer_ptr + places, packed, mask=places * 8 < left)


@triton.jit(do_not_specialize=["numel"])
def unpack_mask_kernel(buffer_ptr, flags_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write the bools of packed bits.

    buffer_ptr: uint8 [ceil(numel / 8)]. flags_ptr: uint8 [numel], each set to 0 or 1. numel: > 0.
    """
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    flags_ptr += first * 8
    buffer_ptr += first
    places = tl.arange(0, BYTES)
    bits = tl.arange(0, 8).to(tl.uint8)[None, :]
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    if left == BYTES * 8:
        packed = tl.load(buffer_ptr + places)[:, None]
        tl.store(flags_ptr + offsets, (packed >> bits) & 1)
    else:
        packed = tl.load(buffer_ptr + places, mask=places * 8 < left, other=0)[:, None]
        tl.store(flags_ptr + offsets, (packed >> bits) & 1, mask=offsets < left)


@triton.jit(do_not_specialize=["numel"])
def pack_signs_kernel(x_ptr, buffer_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write of each element whether it is above zero, or NaN; bits beyond the last element are 0.

    x_ptr: bf16, fp16 or fp32 [numel]. buffer_ptr: uint8 [ceil(numel / 8)]. numel: > 0.
    """
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    x_ptr += first * 8
    buffer_ptr += first
    places = tl.arange(0, BYTES)
    bits = tl.arange(0, 8)
    offsets = places[:, None] * 8 + bits[None, :]
    if left == BYTES * 8:
        x = tl.load(x_ptr + offsets)
        flags = tl.where(x <= 0.0, 0, 1)
        tl.store(buffer_ptr + places, tl.sum(flags << bits[None, :], 1).to(tl.uint8))
    else:
        x = tl.load(x_ptr + offsets, mask=offsets < left, other=0.0)
        flags = tl.where(x <= 0.0, 0, 1)
        packed = tl.sum(flags << bits[None, :], 1).to(tl.uint8)
        tl.store(buffer_ptr + places, packed, mask=places * 8 < left)


@triton.jit(do_not_specialize=["numel"])
def unpack_signs_kernel(buffer_ptr, out_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write 1 where a bit is set, else 0.

    buffer_ptr: uint8 [ceil(numel / 8)]. out_ptr: bf16, fp16 or fp32 [numel]. numel: > 0.
    """
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    out_ptr += first * 8
    buffer_ptr += first
    places = tl.arange(0, BYTES)
    bits = tl.arange(0, 8).to(tl.uint8)[None, :]
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if left == BYTES * 8:
        packed = tl.load(buffer_ptr + places)[:, None]
        tl.store(out_ptr + offsets, ((packed >> bits) & 1).to(tl.float32).to(dtype))
    else:
        packed = tl.load(buffer_ptr + places, mask=places * 8 < left, other=0)[:, None]
        values = ((packed >> bits) & 1).to(tl.float32).to(dtype)
        tl.store(out_ptr + offsets, values, mask=offsets < left)
