"""Wrong device functions for the kernels of vramx.nn, which interpreted_nn.py plants by name.

Each is an error that somebody could make and that a look at a few values would not show.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from vramx.kernels import (
    activation,
    channel_norm,
    channel_norm_backward,
    channel_norm_tables,
    cross_entropy,
    cross_entropy_pieces,
    dropout,
    glu,
    norm,
    norm_backward,
    norm_forward,
    rotary,
    tiles,
)
from vramx.kernels.noise import noise_words
from vramx.kernels.norm import _load_scales
from vramx.kernels.tiles import tile_offsets

# -- Elementwise functions, rotary embedding and the loss ------------------------------------------


@triton.jit
def _slope_of_the_value_only(x, KIND: tl.constexpr):
    return activation.value_of(x, KIND, tl.float32), activation._logistic(x)


@triton.jit
def _gelu_of_degree_4(x):
    distance = tl.minimum(tl.abs(x), 16.0)
    power = 0.002887627575546503 * distance - 0.038807231932878494
    power = power * distance - 0.4764499068260193
    power = power * distance - 1.1435503959655762
    tail = tl.exp2(tl.minimum(power * distance - 1.000529408454895, 0.0))
    tail = tl.where(distance > 8.0, 0.0, tail)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - distance * tail


@triton.jit
def _noise_of_another_block(
    seed_ptr, stream, block, ROWS: tl.constexpr, COLS: tl.constexpr, SPAN: tl.constexpr
):
    return noise_words(seed_ptr, stream, block * 0, ROWS, COLS, SPAN)


@triton.jit
def _noise_of_one_stream(seed_ptr, stream, block, ROWS: tl.constexpr, COLS: tl.constexpr):
    return _RIGHT_NOISE(seed_ptr, stream * 0, block, ROWS, COLS)


_RIGHT_NOISE = tiles.noise_bytes


@triton.jit
def _never_capped(x, cap, CAPPED: tl.constexpr):
    return x


@triton.jit
def _sum_of_other_bases(tops, sums):
    return tl.max(tops, 0), tl.sum(sums, 0)


@triton.jit
def _the_opposite_angle(sin1, sin2, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        return -sin2, -sin1
    return sin2, sin1


# -- Norms of rows ---------------------------------------------------------------------------------


@triton.jit
def _first_row_for_all(values, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    first = tl.sum(tl.where(tl.arange(0, ROWS) == 0, values, 0.0), 0)
    return tl.zeros((ROWS * GROUPS, 1), tl.float32) + first


@triton.jit
def _last_group_forgotten(tile, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    totals = tl.reshape(tl.sum(tile, 1), (ROWS, GROUPS))
    return tl.sum(tl.where(tl.arange(0, GROUPS)[None, :] < GROUPS - 1, totals, 0.0), 1)


@triton.jit
def _last_group_of_both_forgotten(a, b, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    return _last_group_forgotten(a, GROUPS, ROWS), _last_group_forgotten(b, GROUPS, ROWS)


@triton.jit
def _columns_of_the_first_group(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    groups = tl.arange(0, ROWS * GROUPS) * 0
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _weight_of_the_first_group(
    weight_ptr, HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    columns = _columns_of_the_first_group(GROUP, GROUPS, ROWS)
    return tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0)


@triton.jit
def _scales_from_an_even_group(
    kept_ptr, rows, first, filled, HIDDEN: tl.constexpr, GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    even = first // (2 * GROUP) * (2 * GROUP)
    return _load_scales(kept_ptr, rows, even, filled, HIDDEN, GROUP, TILE_GROUPS)


# -- Norms by channel ------------------------------------------------------------------------------

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
    first, left, inner, channels, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    return _right_position(
        0 * first, left, inner, channels, POSITIONS, INNER, CHANNELS, ROWS, GROUP, MASKED
    )


@triton.jit
def _beyond_the_end(
    first, left, inner, channels, POSITIONS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
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


DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "slope without its second term": (glu, "value_and_slope", _slope_of_the_value_only),
    "slope of the activation": (activation, "value_and_slope", _slope_of_the_value_only),
    "a polynomial of degree 4": (activation, "_gelu_of_halves", _gelu_of_degree_4),
    "one block of noise for all": (dropout, "noise_words", _noise_of_another_block),
    "one stream for gate and up": (tiles, "noise_bytes", _noise_of_one_stream),
    "the opposite angle": (rotary, "sines", _the_opposite_angle),
    "no cap": (cross_entropy, "_capped", _never_capped),
    "sums of other bases": (cross_entropy_pieces, "combine", _sum_of_other_bases),
    "one factor for all rows": (norm_forward, "spread", _first_row_for_all),
    "a group left out of the sums": (norm_forward, "row_totals", _last_group_forgotten),
    "weights of the first group": (norm_forward, "row_columns", _columns_of_the_first_group),
    "one factor for all rows of a gradient": (norm_backward, "spread", _first_row_for_all),
    "a group left out of a gradient's sums": (norm_backward, "row_totals", _last_group_forgotten),
    "a group left out of a centred gradient's sums":
        (norm_backward, "row_totals_of_two", _last_group_of_both_forgotten),
    "a gradient's weights of the first group":
        (norm_backward, "_load_weight", _weight_of_the_first_group),
    "the scales of an odd row read as of an even one":
        (norm, "_load_scales", _scales_from_an_even_group),
    "the channel of a tile's first element":
        (channel_norm, "channel_values", _first_channel_of_the_tile),
    "channels that begin anew in each tile": (channel_norm, "position_of", _from_the_first_channel),
    "channels of what is beyond the end": (channel_norm, "position_of", _beyond_the_end),
    "bits of the neighbouring byte": (channel_norm_backward, "load_bits", _bits_of_the_next_byte),
    "headers of the first group":
        (channel_norm_backward, "unpack_groups", _headers_of_the_first_group),
    "a slope for all channels": (channel_norm_backward, "channel_values", _one_value_for_all),
    "momentum of the old statistics":
        (channel_norm_tables, "_move", _as_if_momentum_were_of_the_old),
}  # fmt: skip
