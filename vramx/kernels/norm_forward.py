"""RMSNorm and LayerNorm, forward, and their output again from what was kept.

    s = x + residual, rounded to the type of x        r = 1 / sqrt(mean (s - m)**2 + eps)
    n = (s - m) * r                                   m = mean s if CENTRED, else 0
    y = n * weight + bias

Tiles are norm.py's, and the launcher is norm_launch.py; n is packed with the noise of quantize.py.
A row is read once and stays in registers, as float32. Any pointer that may be null is None, which
the compiler knows. No two programs share a byte. Traffic an element in bf16 with 8 bits: 5.05
bytes, 9.05 with a residual; the output again 3.05.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.norm import (
    is_filled,
    is_inside,
    load_normalised,
    load_rows,
    row_columns,
    row_offsets,
    row_totals,
    spread,
)
from vramx.kernels.tiles import pack_groups


@triton.jit(do_not_specialize=["rows", "stream", "eps"])
def norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, kept_ptr, rstd_ptr, seed_ptr,
    rows: tl.int64, stream: tl.int64, eps,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    CENTRED: tl.constexpr, PACKED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write y, and s, n and r where they are asked for. A program owns ROWS rows of all of them.

    x_ptr, residual_ptr (or None), sum_ptr (None with it): [rows, HIDDEN] of one type, as kept_ptr
    unless PACKED. y_ptr: [rows, HIDDEN] of any type. weight_ptr, bias_ptr: [HIDDEN] or None.
    kept_ptr: None, or uint8 [Layout.buffer_bytes], 16-byte aligned. rstd_ptr: fp32 [rows], None
    with kept_ptr. seed_ptr: int64 [2], seed and epoch; None unless STOCHASTIC. rows * HIDDEN of at
    most 2**35 if STOCHASTIC: the noise of a tile then never carries out of a word.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = row * HIDDEN
    left = tl.minimum(rows - row, ROWS).to(tl.int32)
    inside = is_inside(left, HIDDEN, GROUP, GROUPS, ROWS)
    offsets = row_offsets(GROUP, GROUPS, ROWS)
    s = load_rows(x_ptr + first + offsets, inside)
    if residual_ptr is not None:
        total = (s + load_rows(residual_ptr + first + offsets, inside)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + first + offsets, total, mask=inside)
        s = total.to(tl.float32)
    if CENTRED:
        s -= spread(row_totals(s, GROUPS, ROWS) / HIDDEN, GROUPS, ROWS)
        s = tl.where(inside, s, 0.0)
    rstd = tl.rsqrt(row_totals(s * s, GROUPS, ROWS) / HIDDEN + eps)
    n = s * spread(rstd, GROUPS, ROWS)
    if kept_ptr is not None:
        lanes = tl.arange(0, ROWS)
        tl.store(rstd_ptr + row + lanes, rstd, mask=lanes < left)
        if PACKED:
            pack_groups(
                n, kept_ptr, seed_ptr, stream, rows * HIDDEN, first, None,
                is_filled(left, HIDDEN, GROUP, GROUPS, ROWS),
                ROWS * GROUPS, GROUP, True, STOCHASTIC,
            )  # fmt: skip
        else:
            kept = n.to(kept_ptr.dtype.element_ty)
            tl.store(kept_ptr + first + offsets, kept, mask=inside)
    y = _affine(n, weight_ptr, bias_ptr, HIDDEN, GROUP, GROUPS, ROWS)
    tl.store(y_ptr + first + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _affine(
    n, weight_ptr, bias_ptr,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return n * weight + bias, either of which may be None."""
    columns = row_columns(GROUP, GROUPS, ROWS)
    known = columns < HIDDEN if HIDDEN != GROUPS * GROUP else None
    if weight_ptr is not None:
        n = n * load_rows(weight_ptr + columns, known)
    if bias_ptr is not None:
        n = n + load_rows(bias_ptr + columns, known)
    return n


@triton.jit(do_not_specialize=["rows"])
def norm_output_kernel(
    kept_ptr, weight_ptr, bias_ptr, y_ptr, rows: tl.int64,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Write y = n * weight + bias. Arguments as norm_forward_kernel's; a program owns ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = row * HIDDEN
    left = tl.minimum(rows - row, ROWS).to(tl.int32)
    inside = is_inside(left, HIDDEN, GROUP, GROUPS, ROWS)
    offsets = row_offsets(GROUP, GROUPS, ROWS)
    n = load_normalised(
        kept_ptr, rows, first, offsets, inside, left, HIDDEN, GROUP, GROUPS, ROWS, PACKED
    )
    y = _affine(n, weight_ptr, bias_ptr, HIDDEN, GROUP, GROUPS, ROWS)
    tl.store(y_ptr + first + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)
