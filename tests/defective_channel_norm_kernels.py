"""Wrong device functions for the kernels of channel_norm.py, which interpreted_nn.py plants.

Each is an error that somebody could make and that a look at a few values would not show.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from vramx.kernels import channel_norm, channel_norm_backward, channel_norm_tables, tiles
from vramx.kernels.tiles import tile_offsets

_right_position = channel_norm.position_of
_right_values = channel_norm.channel_values
_right_groups = tiles.unpack_groups
_right_move = channel_norm_tables._move


@triton.jit
def _first_channel_of_the_tile(table_ptr, position, POSITIONS: tl.constexpr):
    if POSITIONS == "long":
        return tl.load(table_ptr + position[0]).to(tl.float32)
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.load(table_ptr + position[0]).to(tl.float32)


@triton.jit
def _from_the_first_channel(
    first,
    left,
    inner,
    channels,
    POSITIONS: tl.constexpr,
    INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    return _right_position(
        0 * first, left, inner, channels, POSITIONS, INNER, CHANNELS, ROWS, GROUP, MASKED
    )


@triton.jit
def _beyond_the_end(
    first,
    left,
    inner,
    channels,
    POSITIONS: tl.constexpr,
    INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    return _right_position(
        first, left, inner, channels, POSITIONS, INNER, CHANNELS, ROWS, GROUP, False
    )


@triton.jit
def _one_value_for_all(table_ptr, position, POSITIONS: tl.constexpr):
    return _right_values(table_ptr, position, POSITIONS) * 0.0 + tl.load(table_ptr).to(tl.float32)


@triton.jit
def _bits_of_the_next_byte(
    bits_ptr, first, left, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr
):
    places = (tile_offsets(ROWS, GROUP // 8) + 1) % (ROWS * GROUP // 8)
    packed = tl.load(bits_ptr + first // 8 + places, mask=places * 8 < left if MASKED else None)
    octets = packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]
    return (tl.reshape(octets, (ROWS, GROUP)) & 1) != 0


@triton.jit
def _headers_of_the_first_group(
    codes, buffer_ptr, numel, first, groups, filled, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr
):
    return _right_groups(codes, buffer_ptr, numel, first, groups * 0, filled, GROUP, SYMMETRIC)


@triton.jit
def _as_if_momentum_were_of_the_old(pointers, new, momentum, inside):
    _right_move(pointers, new, 1.0 - momentum, inside)


DEFECTS: dict[str, tuple[ModuleType, str, Any]] = {
    "the channel of a tile's first element": (
        channel_norm,
        "channel_values",
        _first_channel_of_the_tile,
    ),
    "channels that begin anew in each tile": (channel_norm, "position_of", _from_the_first_channel),
    "channels of what is beyond the end": (channel_norm, "position_of", _beyond_the_end),
    "bits of the neighbouring byte": (channel_norm_backward, "load_bits", _bits_of_the_next_byte),
    "headers of the first group": (
        channel_norm_backward,
        "unpack_groups",
        _headers_of_the_first_group,
    ),
    "a slope for all channels": (channel_norm_backward, "channel_values", _one_value_for_all),
    "momentum of the old statistics": (
        channel_norm_tables,
        "_move",
        _as_if_momentum_were_of_the_old,
    ),
}
