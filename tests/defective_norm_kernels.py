"""Wrong device functions for the kernels of the norms, which interpreted_nn.py plants.

Each is an error that somebody could make and that a look at a few values would not show.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from vramx.kernels import headers, layer_norm_backward, norm_backward, norm_forward, norm_totals


@triton.jit
def _scale_to_nearest(peak, LEVELS: tl.constexpr):
    bits = (peak * (1.00000095367431640625 / LEVELS)).to(tl.int32, bitcast=True)
    rounded = tl.maximum((bits + 0x8000) & -0x10000, 0x00800000)
    return tl.where((bits & 0x7FFFFFFF) >= 0x7F800000, 0x7FC00000, rounded)


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
def _last_warp_forgotten(tile, LANES: tl.constexpr):
    of_warp: tl.constexpr = tile.shape[0] * tile.shape[1] * 32 // LANES
    warps = tl.sum(tl.reshape(tile, (LANES // 32, of_warp)), 1)
    return tl.where(tl.arange(0, LANES // 32) < LANES // 32 - 1, warps, 0.0)


@triton.jit
def _store_in_order(share, share_ptr, HIDDEN: tl.constexpr):
    columns = tl.arange(0, share.shape[0] * share.shape[1])
    flat = tl.reshape(share, (share.shape[0] * share.shape[1],))
    tl.store(share_ptr + columns, flat, mask=columns < HIDDEN)


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


DEFECTS: dict[str, tuple[ModuleType, str, Any]] = {
    "scale rounded to nearest": (headers, "_scale_bits", _scale_to_nearest),
    "one factor for all rows": (norm_forward, "spread", _first_row_for_all),
    "a group left out of the sums": (norm_forward, "row_totals", _last_group_forgotten),
    "weights of the first group": (norm_forward, "row_columns", _columns_of_the_first_group),
    "one factor for all rows of a gradient": (norm_backward, "spread", _first_row_for_all),
    "a group left out of a gradient's sums": (norm_backward, "row_totals", _last_group_forgotten),
    "a group left out of a centred gradient's sums": (
        norm_backward,
        "row_totals_of_two",
        _last_group_of_both_forgotten,
    ),
    "a gradient's weights of the first group": (
        norm_backward,
        "load_weight",
        _weight_of_the_first_group,
    ),
    "a warp left out of a row": (norm_totals, "_warp_sums", _last_warp_forgotten),
    "shares not by halves": (layer_norm_backward, "store_halves", _store_in_order),
}
