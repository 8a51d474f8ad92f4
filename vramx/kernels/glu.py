"""Gated linear units that keep their two inputs packed, and their backward.

    forward     z = act(gate) * up             and the packed gate and up, in one read of both
    backward    dgate = dz * up * act'(gate),  dup = dz * act(gate),  and z where wanted

Two streams of noise: with one for both, the errors of gate and up would be correlated, and what is
a product of them biased. A program owns ROWS groups of each tensor; no two programs share a byte.
fp32 in registers. Traffic an element in bf16 with 8 bits: 8.09 bytes forward, 8.09 backward, 10.09
with z.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.activation import kept_tile, value_and_slope, value_of
from vramx.kernels.quantize4 import load_halves, pack_halves, store_halves, unpack_halves
from vramx.kernels.tiles import load_tile, pack_tile, store_tile


@triton.jit(do_not_specialize=["numel", "gate_stream", "up_stream"])
def glu_kernel(
    gate_ptr, up_ptr, z_ptr, gate_buffer_ptr, up_buffer_ptr, seed_ptr, numel: tl.int64,
    gate_stream: tl.int64, up_stream: tl.int64,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TAIL_ROWS: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write z = act(gate) * up and, if BITS is 8 or 4, the packed gate and up.

    gate_ptr, up_ptr, z_ptr: bf16, fp16 or fp32 [numel]; z_ptr may be another of them if BITS is 0,
    for a tile is read before it is written. gate_buffer_ptr, up_buffer_ptr: uint8
    [Layout.buffer_bytes]; any pointers if BITS is 0. seed_ptr: int64[2], seed and epoch; any
    pointer unless STOCHASTIC. numel: > 0.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _glu_tile(
            gate_ptr, up_ptr, z_ptr, gate_buffer_ptr, up_buffer_ptr, seed_ptr,
            gate_stream, up_stream, numel, first, left,
            KIND, BITS, ROWS, GROUP, SYMMETRIC, STOCHASTIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _glu_tile(
                gate_ptr, up_ptr, z_ptr, gate_buffer_ptr, up_buffer_ptr, seed_ptr,
                gate_stream, up_stream, numel, first + row * GROUP, left - row * GROUP,
                KIND, BITS, TAIL_ROWS, GROUP, SYMMETRIC, STOCHASTIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _glu_tile(
    gate_ptr, up_ptr, z_ptr, gate_buffer_ptr, up_buffer_ptr, seed_ptr, gate_stream, up_stream,
    numel, first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if BITS == 4:
        gate_a, gate_b = load_halves(gate_ptr + first, left, ROWS, GROUP, MASKED)
        up_a, up_b = load_halves(up_ptr + first, left, ROWS, GROUP, MASKED)
        z_a = value_of(gate_a, KIND, z_ptr.dtype.element_ty) * up_a
        z_b = value_of(gate_b, KIND, z_ptr.dtype.element_ty) * up_b
        store_halves(z_ptr + first, z_a, z_b, left, ROWS, GROUP, MASKED)
        pack_halves(
            gate_a, gate_b, gate_buffer_ptr, seed_ptr, gate_stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip
        pack_halves(
            up_a, up_b, up_buffer_ptr, seed_ptr, up_stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip
    else:
        gate = load_tile(gate_ptr + first, left, ROWS, GROUP, MASKED)
        up = load_tile(up_ptr + first, left, ROWS, GROUP, MASKED)
        z = value_of(gate, KIND, z_ptr.dtype.element_ty) * up
        store_tile(z_ptr + first, z, left, ROWS, GROUP, MASKED)
        if BITS == 8:
            pack_tile(
                gate, gate_buffer_ptr, seed_ptr, gate_stream, numel, first, left,
                ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
            )  # fmt: skip
            pack_tile(
                up, up_buffer_ptr, seed_ptr, up_stream, numel, first, left,
                ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["numel"])
def glu_backward_kernel(
    dz_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, z_ptr, numel: tl.int64,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TAIL_ROWS: tl.constexpr, SYMMETRIC: tl.constexpr, WITH_VALUE: tl.constexpr,
):  # fmt: skip
    """Write dgate, dup and, if WITH_VALUE, z.

    dz_ptr, dgate_ptr, dup_ptr: bf16, fp16 or fp32 [numel]. gate_ptr, up_ptr: the packed tensors, or
    the tensors if BITS is 0; then dgate_ptr may be gate_ptr and dup_ptr up_ptr: a tile is read
    before it is written. So z_ptr, [numel], may be dz_ptr; any pointer unless WITH_VALUE.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _glu_backward_tile(
            dz_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, z_ptr, numel, first, left,
            KIND, BITS, ROWS, GROUP, SYMMETRIC, WITH_VALUE, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _glu_backward_tile(
                dz_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, z_ptr, numel, first + row * GROUP,
                left - row * GROUP, KIND, BITS, TAIL_ROWS, GROUP, SYMMETRIC, WITH_VALUE, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _glu_backward_tile(
    dz_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, z_ptr, numel, first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, WITH_VALUE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if BITS == 4:
        _glu_backward_halves(
            dz_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, z_ptr, numel, first, left,
            KIND, ROWS, GROUP, SYMMETRIC, WITH_VALUE, MASKED,
        )  # fmt: skip
    else:
        dz = load_tile(dz_ptr + first, left, ROWS, GROUP, MASKED)
        gate = kept_tile(gate_ptr, numel, first, left, BITS, ROWS, GROUP, SYMMETRIC, MASKED)
        up = kept_tile(up_ptr, numel, first, left, BITS, ROWS, GROUP, SYMMETRIC, MASKED)
        value, slope = value_and_slope(gate, KIND)
        store_tile(dgate_ptr + first, dz * up * slope, left, ROWS, GROUP, MASKED)
        store_tile(dup_ptr + first, dz * value, left, ROWS, GROUP, MASKED)
        if WITH_VALUE:
            store_tile(z_ptr + first, value * up, left, ROWS, GROUP, MASKED)


@triton.jit
def _glu_backward_halves(
    dz_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, z_ptr, numel, first, left,
    KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
    WITH_VALUE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do a tile of 4 bits."""
    dz_a, dz_b = load_halves(dz_ptr + first, left, ROWS, GROUP, MASKED)
    gate_a, gate_b = unpack_halves(gate_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
    up_a, up_b = unpack_halves(up_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
    value_a, slope_a = value_and_slope(gate_a, KIND)
    value_b, slope_b = value_and_slope(gate_b, KIND)
    dgate_a, dgate_b = dz_a * up_a * slope_a, dz_b * up_b * slope_b
    store_halves(dgate_ptr + first, dgate_a, dgate_b, left, ROWS, GROUP, MASKED)
    store_halves(dup_ptr + first, dz_a * value_a, dz_b * value_b, left, ROWS, GROUP, MASKED)
    if WITH_VALUE:
        store_halves(z_ptr + first, value_a * up_a, value_b * up_b, left, ROWS, GROUP, MASKED)
