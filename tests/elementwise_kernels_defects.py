"""Defects for the child of interpreted_nn.py: wrong device functions, by name."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from vramx.kernels import (
    activation,
    cross_entropy,
    cross_entropy_pieces,
    dropout,
    glu,
    rotary,
    tiles,
)
from vramx.kernels.noise import noise_words


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


DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "slope without its second term": (glu, "value_and_slope", _slope_of_the_value_only),
    "slope of the activation": (activation, "value_and_slope", _slope_of_the_value_only),
    "a polynomial of degree 4": (activation, "_gelu_of_halves", _gelu_of_degree_4),
    "one block of noise for all": (dropout, "noise_words", _noise_of_another_block),
    "one stream for gate and up": (tiles, "noise_bytes", _noise_of_one_stream),
    "the opposite angle": (rotary, "sines", _the_opposite_angle),
    "no cap": (cross_entropy, "_capped", _never_capped),
    "sums of other bases": (cross_entropy_pieces, "combine", _sum_of_other_bases),
}
