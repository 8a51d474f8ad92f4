"""Normalisation by channel, forward, and its output again from what was kept.

A tensor is a flat run of elements, as it lies in memory, in which `inner` elements that follow each
other are of one channel, and the channels follow each other round and round: batch norm of NCHW has
inner = H W, of channels_last inner = 1; group and instance norm have a channel for each pair of
sample and channel. What is of a channel is read from tables of fp32 or of the parameters' type.

    n = (x - mean) * rstd              kept, packed to 8 bits or as it is
    z = n * weight + bias + residual   y = act(z)

ReLU and leaky ReLU pass a gradient where y > 0 or is NaN: that is kept as a bit an element, because
a packed n does not know it. The other functions' derivative is of z again, from the packed n.

A program owns ROWS groups of GROUP elements, as in quantize.py; no two programs share a byte.
POSITIONS says how channels are found: "rows" where inner is 1, "blocks" if besides channels are a
multiple of GROUP; "long" where a tile has elements of at most two channels, which
inner >= ROWS * GROUP ensures; "short" where it has more, but not all:
ROWS * GROUP // inner + 2 <= channels. fp32 in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.activation import kept_tile, value_of
from vramx.kernels.tiles import load_tile, pack_tile, store_tile, tile_offsets


@triton.jit
def position_of(
    first, left, inner, channels,
    POSITIONS: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return what channel_values() takes: channels, those that follow, and where these begin.

    What is beyond the end of a MASKED tile has the last element's channel, as load_tile() has its
    value: its n then changes no minimum and no maximum.
    """
    offsets = tile_offsets(ROWS, GROUP)
    if MASKED:
        offsets = tl.minimum(offsets, left - 1)
    if POSITIONS == "long":
        here = (first // inner) % channels
        following = tl.where(here + 1 == channels, 0, here + 1)
        end = tl.minimum(inner - first % inner, ROWS * GROUP).to(tl.int32)
        return here, following, offsets < end
    elif POSITIONS == "short":  # noqa: RET505 - the compiler types what it sees
        here = ((first // INNER) % channels).to(tl.int32)
        here = here + ((first % INNER).to(tl.int32) + offsets) // INNER
        here = tl.where(here >= channels, here - channels.to(tl.int32), here)
        # Of elements that follow each other in a thread one is asked for.
        if not MASKED and INNER % 16 == 0:
            here = tl.max_constancy(here, [1, 16])
        elif not MASKED and INNER % 4 == 0:
            here = tl.max_constancy(here, [1, 4])
        return here, here, 0
    elif POSITIONS == "blocks":
        # No group is cut: what a tile has beyond the end is written nowhere.
        blocks = (channels // GROUP).to(tl.int32)
        rows = ((first // GROUP) % blocks).to(tl.int32) + tl.arange(0, ROWS)
        here = (rows % blocks)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        return here, here, 0
    elif GROUP % CHANNELS == 0:
        here = offsets % CHANNELS
        return here, here, 0
    else:
        here = ((first % CHANNELS).to(tl.int32) + offsets) % CHANNELS
        if not MASKED and CHANNELS % 8 == 0:
            here = tl.max_contiguous(tl.multiple_of(here, [1, 8]), [1, 8])
        return here, here, 0


@triton.jit
def channel_values(table_ptr, position, POSITIONS: tl.constexpr):
    """Return what a table says of each element of a tile, fp32, of its shape or of one row."""
    if POSITIONS == "long":
        here = tl.load(table_ptr + position[0]).to(tl.float32)
        following = tl.load(table_ptr + position[1]).to(tl.float32)
        return tl.where(position[2], here, following)
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.load(table_ptr + position[0]).to(tl.float32)


@triton.jit
def affine_tile(n, weight_ptr, bias_ptr, position, POSITIONS: tl.constexpr):
    if weight_ptr is not None:
        n = n * channel_values(weight_ptr, position, POSITIONS)
    if bias_ptr is not None:
        n = n + channel_values(bias_ptr, position, POSITIONS)
    return n


@triton.jit
def store_bits(
    bits_ptr, passes, first, left, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr
):
    """Write a bit for each element of a tile: bit k of byte j is element 8 j + k."""
    if MASKED:
        passes = passes & (tile_offsets(ROWS, GROUP) < left)
    octets = tl.reshape(passes.to(tl.int32), (ROWS, GROUP // 8, 8))
    packed = tl.sum(octets << tl.arange(0, 8)[None, None, :], 2).to(tl.uint8)
    places = tile_offsets(ROWS, GROUP // 8)
    tl.store(bits_ptr + first // 8 + places, packed, mask=places * 8 < left if MASKED else None)


@triton.jit
def load_bits(bits_ptr, first, left, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr):
    """Return a bool for each element of a tile."""
    places = tile_offsets(ROWS, GROUP // 8)
    packed = tl.load(bits_ptr + first // 8 + places, mask=places * 8 < left if MASKED else None)
    octets = packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]
    return (tl.reshape(octets, (ROWS, GROUP)) & 1) != 0


@triton.jit(do_not_specialize=["numel", "stream", "inner", "channels", "leak"])
def channel_norm_kernel(
    x_ptr, residual_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, y_ptr, kept_ptr, bits_ptr,
    seed_ptr, numel: tl.int64, stream: tl.int64, inner: tl.int64, channels: tl.int64,
    leak: tl.float32,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write y, n as BITS says (8: packed, 0: as it is, -1: not at all), and the bits.

    x_ptr, y_ptr, residual_ptr (or None): bf16, fp16 or fp32 [numel] of one type, as kept_ptr if
    BITS is 0. mean_ptr, rstd_ptr: fp32 [channels]. weight_ptr, bias_ptr: [channels] or None.
    kept_ptr: uint8 [Layout.buffer_bytes] if BITS is 8. bits_ptr: uint8 [ceil(numel / 8)] or None.
    seed_ptr: int64[2], any pointer unless STOCHASTIC. leak: the slope below zero of leaky ReLU,
    0 of ReLU. INNER, CHANNELS: `inner` and `channels`, where POSITIONS divides by them, else 0.
    numel: > 0.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _channel_norm_tile(
            x_ptr, residual_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, y_ptr, kept_ptr,
            bits_ptr, seed_ptr, numel, stream, inner, channels, leak, first, left,
            KIND, BITS, POSITIONS, INNER, CHANNELS, GROUP, ROWS, SYMMETRIC, STOCHASTIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _channel_norm_tile(
                x_ptr, residual_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, y_ptr, kept_ptr,
                bits_ptr, seed_ptr, numel, stream, inner, channels, leak, first + row * GROUP,
                left - row * GROUP, KIND, BITS, POSITIONS, INNER, CHANNELS, GROUP, TAIL_ROWS,
                SYMMETRIC, STOCHASTIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _channel_norm_tile(
    x_ptr, residual_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, y_ptr, kept_ptr, bits_ptr,
    seed_ptr, numel, stream, inner, channels, leak, first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    position = position_of(
        first, left, inner, channels, POSITIONS, INNER, CHANNELS, ROWS, GROUP, MASKED
    )
    x = load_tile(x_ptr + first, left, ROWS, GROUP, MASKED)
    n = x - channel_values(mean_ptr, position, POSITIONS)
    n = n * channel_values(rstd_ptr, position, POSITIONS)
    z = affine_tile(n, weight_ptr, bias_ptr, position, POSITIONS)
    if residual_ptr is not None:
        z += load_tile(residual_ptr + first, left, ROWS, GROUP, MASKED)
    if KIND == "leaky_relu":
        # Of the rounded z, as torch's own, which gets that.
        rounded = z.to(y_ptr.dtype.element_ty).to(tl.float32)
        passes = rounded > 0.0
        passes = passes | (rounded != rounded)
        if bits_ptr is not None:
            store_bits(bits_ptr, passes, first, left, ROWS, GROUP, MASKED)
        y = tl.where(passes, z, tl.where(leak == 0.0, 0.0, z * leak))
    elif KIND == "none":
        y = z
    else:
        y = value_of(z, KIND, y_ptr.dtype.element_ty)
    store_tile(y_ptr + first, y, left, ROWS, GROUP, MASKED)
    if BITS == 8:
        pack_tile(
            n, kept_ptr, seed_ptr, stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip
    elif BITS == 0:
        store_tile(kept_ptr + first, n, left, ROWS, GROUP, MASKED)


@triton.jit(do_not_specialize=["numel", "inner", "channels", "leak"])
def channel_norm_output_kernel(
    kept_ptr, bits_ptr, weight_ptr, bias_ptr, y_ptr, numel: tl.int64, inner: tl.int64,
    channels: tl.int64, leak: tl.float32,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Write y again, of a norm without a residual. Arguments as channel_norm_kernel's.

    What ReLU passed stays as it was decoded, below zero too: so its mean is that of y.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _output_tile(
            kept_ptr, bits_ptr, weight_ptr, bias_ptr, y_ptr, numel, inner, channels, leak, first,
            left, KIND, BITS, POSITIONS, INNER, CHANNELS, GROUP, ROWS, SYMMETRIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _output_tile(
                kept_ptr, bits_ptr, weight_ptr, bias_ptr, y_ptr, numel, inner, channels, leak,
                first + row * GROUP, left - row * GROUP, KIND, BITS, POSITIONS, INNER, CHANNELS,
                GROUP, TAIL_ROWS, SYMMETRIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _output_tile(
    kept_ptr, bits_ptr, weight_ptr, bias_ptr, y_ptr, numel, inner, channels, leak, first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    position = position_of(
        first, left, inner, channels, POSITIONS, INNER, CHANNELS, ROWS, GROUP, MASKED
    )
    n = kept_tile(kept_ptr, numel, first, left, BITS, ROWS, GROUP, SYMMETRIC, MASKED)
    y = affine_tile(n, weight_ptr, bias_ptr, position, POSITIONS)
    if KIND == "leaky_relu":
        passes = load_bits(bits_ptr, first, left, ROWS, GROUP, MASKED)
        y = tl.where(passes, y, tl.where(leak == 0.0, 0.0, y * leak))
    elif KIND != "none":
        y = value_of(y, KIND, y_ptr.dtype.element_ty)
    store_tile(y_ptr + first, y, left, ROWS, GROUP, MASKED)
