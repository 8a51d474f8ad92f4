"""Wrong device functions for the kernels of the norms, which interpreted_nn.py plants.

Each is an error that somebody could make and that a look at a few values would not show.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from vramx.kernels import norm, norm_backward, norm_forward
from vramx.kernels.norm import _load_scales


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
    kept_ptr,
    rows,
    first,
    filled,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    even = first // (2 * GROUP) * (2 * GROUP)
    return _load_scales(kept_ptr, rows, even, filled, HIDDEN, GROUP, TILE_GROUPS)


DEFECTS: dict[str, tuple[ModuleType, str, Any]] = {
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
        "_load_weight",
        _weight_of_the_first_group,
    ),
    "the scales of an odd row read as of an even one": (
        norm,
        "_load_scales",
        _scales_from_an_even_group,
    ),
}
