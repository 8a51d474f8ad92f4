"""RMSNorm and LayerNorm, backward: the gradient of the rows, and those of weight and bias.

In the terms of norm_forward.py and the tiles of norm.py; norm_backward_launch.py chooses how many
programs. Each adds up its own share of dweight and dbias, as it goes from tile to tile;
norm_sums.py adds up the shares, and makes them where rows are long. So the sums have one order, and
no two programs share a byte: there are no atomics. All arithmetic is float32. Any pointer that may
be null is None, which the compiler knows. Traffic an element in bf16 with 8 bits: 5.05 bytes, 7.05
with a gradient of the sum; the shares come on top.

Whatever the loop loads is copied to shared memory while earlier tiles are in work. A GPU returns
what it loads in order: one load to registers among them, or one spilled register, is waited for
with all copies before it, and costs up to a third of the speed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.norm import (
    is_inside,
    load_normalised,
    load_rows,
    offsets_by_8,
    row_columns,
    row_totals,
    row_totals_of_two,
    spread,
)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    dy_ptr, dsum_ptr, weight_ptr, kept_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows: tl.int64,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    CENTRED: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, DSUM_LAST: tl.constexpr,
):  # fmt: skip
    """Write dx and each program's share of dweight and dbias.

        g = dy * weight        dx = r * (g - n * mean(g n) - mean(g) if CENTRED) + dsum
        dweight = sum dy * n   dbias = sum dy

    dy_ptr, dx_ptr: [rows, HIDDEN]. dsum_ptr: the gradient of s itself, or None. weight_ptr: or
    None. dweight_ptr, dbias_ptr: [programs, HIDDEN], or None where they are not asked for or
    norm_sums_kernel makes them.
    A program owns every programs-th tile of dx, in ascending order, and its row of the shares: the
    sums depend on the number of programs only. STAGES: how many tiles are in work, all but one of
    them on their way to shared memory. DSUM_LAST: dsum is not held from the start of a tile.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dweight = tl.zeros((ROWS * GROUPS, GROUP), tl.float32)
    dbias = tl.zeros((ROWS * GROUPS, GROUP), tl.float32)
    tiles = tl.cdiv(rows, ROWS).to(tl.int32)
    offsets = offsets_by_8(GROUP, GROUPS, ROWS)
    weight = _load_weight(weight_ptr, HIDDEN, GROUP, GROUPS, ROWS)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        row = tile * tl.full((), ROWS, tl.int64)
        first = row * HIDDEN
        left = tl.minimum(rows - row, ROWS).to(tl.int32)
        inside = is_inside(left, HIDDEN, GROUP, GROUPS, ROWS)
        dy = load_rows(dy_ptr + first + offsets, inside)
        if dsum_ptr is not None and not DSUM_LAST:
            dsum = tl.load(dsum_ptr + first + offsets, mask=inside, other=0.0)
        rstd = _load_factors(rstd_ptr + row, left, ROWS)
        n = load_normalised(
            kept_ptr, rows, first, offsets, inside, left, HIDDEN, GROUP, GROUPS, ROWS, PACKED
        )
        if dweight_ptr is not None:
            dweight += dy * n
        if dbias_ptr is not None:
            dbias += dy
        g = dy if weight_ptr is None else dy * weight.to(tl.float32)
        dx = _gradient(g, n, rstd, HIDDEN, GROUPS, ROWS, CENTRED)
        if dsum_ptr is not None:
            dx += (
                load_rows(dsum_ptr + first + offsets, inside) if DSUM_LAST else dsum.to(tl.float32)
            )
        tl.store(dx_ptr + first + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if dweight_ptr is not None:
        _store_share(dweight, dweight_ptr + program * HIDDEN, HIDDEN, GROUP, GROUPS, ROWS)
    if dbias_ptr is not None:
        _store_share(dbias, dbias_ptr + program * HIDDEN, HIDDEN, GROUP, GROUPS, ROWS)


@triton.jit
def _gradient(
    g, n, rstd,
    HIDDEN: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Return r * (g - n * mean(g n) - mean(g) if CENTRED) of a tile, two products an element."""
    by_mean = rstd / HIDDEN
    if CENTRED:
        along, total = row_totals_of_two(g * n, g, GROUPS, ROWS)
        dx = g * spread(rstd, GROUPS, ROWS) - spread(total * by_mean, GROUPS, ROWS)
    else:
        along = row_totals(g * n, GROUPS, ROWS)
        dx = g * spread(rstd, GROUPS, ROWS)
    return dx - n * spread(along * by_mean, GROUPS, ROWS)


@triton.jit
def _load_weight(
    weight_ptr, HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the weights of a tile, of their own type, which takes the fewest registers."""
    columns = row_columns(GROUP, GROUPS, ROWS)
    if weight_ptr is None:
        return columns
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0)


@triton.jit
def _load_factors(rstd_ptr, left, ROWS: tl.constexpr):
    """Return the factors of a tile's rows, of the one row a scalar."""
    if ROWS == 1:  # what is loaded as a scalar comes to registers
        return tl.sum(tl.load(rstd_ptr + tl.arange(0, 1)))
    else:  # noqa: RET505 - the compiler types what it sees
        lanes = tl.arange(0, ROWS)
        return tl.load(rstd_ptr + lanes, mask=lanes < left, other=0.0)


@triton.jit
def _store_share(
    tile, share_ptr,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the sum of a tile's rows."""
    if ROWS > 1:
        tile = tl.sum(tl.reshape(tile, (ROWS, GROUPS, GROUP)), 0)
    columns = row_columns(GROUP, GROUPS, 1)
    known = columns < HIDDEN if HIDDEN != GROUPS * GROUP else None
    tl.store(share_ptr + columns, tile, mask=known)
