"""Normalisation by channel, backward.

    g = dy * act'(z)       dx = g * slope - offset - n * along

in the terms of channel_norm.py, whose tensors, tables and ways to find channels these are. The
tables come of the sums of g and of g n over each channel. Where channels are innermost and fit the
groups of the codec, one kernel makes the sums as it reads; elsewhere one writes g and n, and the
sums are torch's. Another one writes dx. fp32 in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.activation import kept_tile, value_and_slope
from vramx.kernels.channel_norm import affine_tile, channel_values, load_bits, position_of
from vramx.kernels.tiles import load_tile, store_tile, unpack_groups


@triton.jit(do_not_specialize=["numel", "inner", "channels", "leak"])
def channel_norm_gradient_kernel(
    dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, g_ptr, n_ptr, numel: tl.int64,
    inner: tl.int64, channels: tl.int64, leak: tl.float32,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Write g and n, for the sums over them; None where one is there already.

    dy_ptr, g_ptr, n_ptr: [numel] of one type. Others as channel_norm_kernel's.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _gradient_tile(
            dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, g_ptr, n_ptr, numel, inner,
            channels, leak, first, left, KIND, BITS, POSITIONS, INNER, CHANNELS, GROUP, ROWS,
            SYMMETRIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _gradient_tile(
                dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, g_ptr, n_ptr, numel, inner,
                channels, leak, first + row * GROUP, left - row * GROUP, KIND, BITS, POSITIONS,
                INNER, CHANNELS, GROUP, TAIL_ROWS, SYMMETRIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _gradient_tile(
    dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, g_ptr, n_ptr, numel, inner, channels, leak,
    first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    n = kept_tile(kept_ptr, numel, first, left, BITS, ROWS, GROUP, SYMMETRIC, MASKED)
    if n_ptr is not None:
        store_tile(n_ptr + first, n, left, ROWS, GROUP, MASKED)
    if g_ptr is not None:
        position = position_of(
            first, left, inner, channels, POSITIONS, INNER, CHANNELS, ROWS, GROUP, MASKED
        )
        g = _gradient_of(
            dy_ptr, n, bits_ptr, weight_ptr, bias_ptr, position, leak, first, left,
            KIND, POSITIONS, ROWS, GROUP, MASKED,
        )  # fmt: skip
        store_tile(g_ptr + first, g, left, ROWS, GROUP, MASKED)


@triton.jit
def _gradient_of(
    dy_ptr, n, bits_ptr, weight_ptr, bias_ptr, position, leak, first, left,
    KIND: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return g of a tile."""
    g = load_tile(dy_ptr + first, left, ROWS, GROUP, MASKED)
    if KIND == "leaky_relu":
        passes = load_bits(bits_ptr, first, left, ROWS, GROUP, MASKED)
        g = tl.where(passes, g, tl.where(leak == 0.0, 0.0, g * leak))
    elif KIND != "none":
        z = affine_tile(n, weight_ptr, bias_ptr, position, POSITIONS)
        _, slope = value_and_slope(z, KIND)
        g = g * slope
    return g


@triton.jit(do_not_specialize=["numel", "inner", "channels", "leak"])
def channel_norm_input_kernel(
    dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, slope_ptr, offset_ptr, along_ptr, g_ptr,
    dx_ptr, numel: tl.int64, inner: tl.int64, channels: tl.int64, leak: tl.float32,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Write g and dx, each unless it is None.

    dx_ptr: [numel], may be dy_ptr: a tile is read before it is written. slope_ptr: fp32 [channels].
    offset_ptr, along_ptr: the same, or None both. Others as channel_norm_kernel's.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _input_tile(
            dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, slope_ptr, offset_ptr, along_ptr,
            g_ptr, dx_ptr, numel, inner, channels, leak, first, left,
            KIND, BITS, POSITIONS, INNER, CHANNELS, GROUP, ROWS, SYMMETRIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _input_tile(
                dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, slope_ptr, offset_ptr, along_ptr,
                g_ptr, dx_ptr, numel, inner, channels, leak, first + row * GROUP,
                left - row * GROUP, KIND, BITS, POSITIONS, INNER, CHANNELS, GROUP, TAIL_ROWS,
                SYMMETRIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _input_tile(
    dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, slope_ptr, offset_ptr, along_ptr, g_ptr,
    dx_ptr, numel, inner, channels, leak, first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    position = position_of(
        first, left, inner, channels, POSITIONS, INNER, CHANNELS, ROWS, GROUP, MASKED
    )
    n = kept_tile(kept_ptr, numel, first, left, BITS, ROWS, GROUP, SYMMETRIC, MASKED)
    g = _gradient_of(
        dy_ptr, n, bits_ptr, weight_ptr, bias_ptr, position, leak, first, left,
        KIND, POSITIONS, ROWS, GROUP, MASKED,
    )  # fmt: skip
    if g_ptr is not None:
        store_tile(g_ptr + first, g, left, ROWS, GROUP, MASKED)
    if dx_ptr is not None:
        dx = g * channel_values(slope_ptr, position, POSITIONS)
        if along_ptr is not None:
            dx -= channel_values(offset_ptr, position, POSITIONS)
            dx -= n * channel_values(along_ptr, position, POSITIONS)
        store_tile(dx_ptr + first, dx, left, ROWS, GROUP, MASKED)


@triton.jit(do_not_specialize=["numel", "leak"])
def channel_norm_sums_kernel(
    dy_ptr, kept_ptr, bits_ptr, weight_ptr, bias_ptr, shares_ptr, numel: tl.int64, width,
    leak: tl.float32,
    KIND: tl.constexpr, BITS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Write each program's share of the sums of g and of g n, where channels are innermost.

    The tensor is rows of `width` elements, of which the last one may be cut: CHANNELS divides
    GROUP, is a multiple of 16, and width is GROUP; or CHANNELS is 0, and width is their number, a
    multiple of GROUP. Program (i, j) owns columns i * GROUP to (i + 1) * GROUP of share j, and
    takes every num_programs(1)-th tile of ROWS rows in ascending order: the sums depend on the
    number of programs only. shares_ptr: fp32 [2, programs(1), width]. Others as
    channel_norm_kernel's.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, ROWS)
    columns = tl.arange(0, GROUP)
    channels = columns % CHANNELS if CHANNELS else block * GROUP + columns
    totals = tl.zeros((ROWS, GROUP), tl.float32)
    along = tl.zeros((ROWS, GROUP), tl.float32)
    step = tl.num_programs(1).to(tl.int64) * ROWS
    row = tl.program_id(1).to(tl.int64) * ROWS
    while row * width < numel:
        # Groups of this tile: width apart, so that a pointer to the first is one to all.
        first = row * width + block * GROUP
        # The mask is one for what a thread reads at once, and the compiler is told.
        left = tl.multiple_of(tl.minimum(numel - first, ROWS * width).to(tl.int32), 16)
        offsets = lanes[:, None] * width + columns[None, :]
        filled = lanes * width < left
        inside = filled[:, None] if CHANNELS == 0 else offsets < left
        g = tl.load(dy_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        if BITS == 8:
            codes = tl.load(kept_ptr + first + offsets, mask=inside, other=0)
            groups = lanes * (width // GROUP)
            n = unpack_groups(codes, kept_ptr, numel, first, groups, filled, GROUP, SYMMETRIC)
        else:
            n = tl.load(kept_ptr + first + offsets, mask=inside, other=0.0).to(tl.float32)
        if KIND == "leaky_relu":
            places = lanes[:, None] * (width // 8) + tl.arange(0, GROUP // 8)[None, :]
            used = filled[:, None] if CHANNELS == 0 else places * 8 < left
            octets = tl.load(bits_ptr + first // 8 + places, mask=used, other=0).to(tl.int32)
            octets = octets[:, :, None] >> tl.arange(0, 8)[None, None, :]
            passes = (tl.reshape(octets, (ROWS, GROUP)) & 1) != 0
            g = tl.where(passes, g, tl.where(leak == 0.0, 0.0, g * leak))
        elif KIND != "none":
            z = n
            if weight_ptr is not None:
                z = z * tl.load(weight_ptr + channels).to(tl.float32)[None, :]
            if bias_ptr is not None:
                z = z + tl.load(bias_ptr + channels).to(tl.float32)[None, :]
            _, slope = value_and_slope(z, KIND)
            g = g * slope
        totals += g
        along += g * n
        row += step
    share = tl.program_id(1) * width + block * GROUP + columns
    tl.store(shares_ptr + share, tl.sum(totals, 0))
    tl.store(shares_ptr + tl.num_programs(1) * width + share, tl.sum(along, 0))
