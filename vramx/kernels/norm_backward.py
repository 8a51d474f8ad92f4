"""RMSNorm and LayerNorm, backward: the gradient of the rows, and those of weight and bias.

In the terms of norm_forward.py and the tiles of norm.py; norm_launch.py chooses how many programs.
Each program adds up its own share of dweight and dbias, as it goes from tile to tile, or where rows
are long in a pass apart; another kernel adds up the shares. So the sums have one order, and no two
programs share a byte: there are no atomics. All arithmetic is float32. Any pointer that may be null
is None, which the compiler knows. Traffic an element in bf16 with 8 bits: 5.02 bytes, 7.02 with a
gradient of the sum, 3.02 more where dweight is made apart; the shares are fp32 and come on top.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.headers import header_pointer, load_scale
from vramx.kernels.norm import (
    is_filled,
    is_inside,
    load_kept,
    load_rows,
    normalise,
    row_columns,
    row_offsets,
    row_totals,
    spread,
)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    dy_ptr,
    dsum_ptr,
    weight_ptr,
    kept_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    rows: tl.int64,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Write dx and each program's share of dweight and dbias.

        g = dy * weight        dx = r * (g - n * mean(g n) - mean(g) if CENTRED) + dsum
        dweight = sum dy * n   dbias = sum dy

    dy_ptr, dx_ptr: [rows, HIDDEN]. dsum_ptr: the gradient of s itself, or None. weight_ptr: or
    None. dweight_ptr, dbias_ptr: fp32 [programs, HIDDEN], or None where they are not asked for or
    norm_sums_kernel makes them.
    A program owns every programs-th tile of dx, in ascending order, and its row of the shares: the
    sums depend on the number of programs only. AHEAD: it loads a tile before it works on the one
    before; the last one's is loaded again.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dweight = tl.zeros((ROWS * GROUPS, GROUP), tl.float32)
    dbias = tl.zeros((ROWS * GROUPS, GROUP), tl.float32)
    tiles = tl.cdiv(rows, ROWS).to(tl.int32)
    if AHEAD:
        next_dy, next_dsum, next_kept, next_headers, next_rstd = _load_backward(
            dy_ptr, dsum_ptr, kept_ptr, rstd_ptr, rows, program, HIDDEN, GROUP, GROUPS, ROWS, PACKED
        )
    for tile in range(program, tiles, programs):
        if AHEAD:
            dy, dsum, kept, headers, rstd = next_dy, next_dsum, next_kept, next_headers, next_rstd
            next_dy, next_dsum, next_kept, next_headers, next_rstd = _load_backward(
                dy_ptr, dsum_ptr, kept_ptr, rstd_ptr, rows, tl.minimum(tile + programs, tiles - 1),
                HIDDEN, GROUP, GROUPS, ROWS, PACKED,
            )  # fmt: skip
        else:
            dy, dsum, kept, headers, rstd = _load_backward(
                dy_ptr, None, kept_ptr, rstd_ptr, rows, tile, HIDDEN, GROUP, GROUPS, ROWS, PACKED
            )
        dy = dy.to(tl.float32)
        n = normalise(kept, headers, PACKED)
        if dweight_ptr is not None:
            dweight += dy * n
        if dbias_ptr is not None:
            dbias += dy
        dx = _gradient(
            dy, n, rstd, weight_ptr, HIDDEN, GROUP, GROUPS, ROWS, CENTRED, FACTOR_FIRST=AHEAD
        )
        row = tile * tl.full((), ROWS, tl.int64)
        left = tl.minimum(rows - row, ROWS).to(tl.int32)
        inside = is_inside(left, HIDDEN, GROUP, GROUPS, ROWS)
        offsets = row * HIDDEN + row_offsets(GROUP, GROUPS, ROWS)
        if dsum_ptr is not None:
            dx += dsum.to(tl.float32) if AHEAD else load_rows(dsum_ptr + offsets, inside)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if dweight_ptr is not None:
        _store_share(dweight, dweight_ptr + program * HIDDEN, HIDDEN, GROUP, GROUPS, ROWS)
    if dbias_ptr is not None:
        _store_share(dbias, dbias_ptr + program * HIDDEN, HIDDEN, GROUP, GROUPS, ROWS)


@triton.jit
def _gradient(
    dy,
    n,
    rstd,
    weight_ptr,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    FACTOR_FIRST: tl.constexpr,
):
    """Return the gradient of a tile's s. FACTOR_FIRST: r is multiplied into g instead of dx.

    Which of the two takes fewer registers depends on what else is held in them.
    """
    columns = row_columns(GROUP, GROUPS, ROWS)
    known = columns < HIDDEN if HIDDEN != GROUPS * GROUP else None
    factor = spread(rstd, GROUPS, ROWS)
    g = dy * factor if FACTOR_FIRST else dy
    if weight_ptr is not None:
        g = g * load_rows(weight_ptr + columns, known)
    dx = g - n * spread(row_totals(g * n, GROUPS, ROWS) / HIDDEN, GROUPS, ROWS)
    if CENTRED:
        dx -= spread(row_totals(g, GROUPS, ROWS) / HIDDEN, GROUPS, ROWS)
    return dx if FACTOR_FIRST else dx * factor


@triton.jit
def _load_backward(
    dy_ptr,
    dsum_ptr,
    kept_ptr,
    rstd_ptr,
    rows,
    tile,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return dy, dsum, what was kept with its headers, and rstd of a tile, as they lie in memory.

    No dsum is dy once more. Nothing is computed of them, which would wait for them.
    """
    row = tile * tl.full((), ROWS, tl.int64)
    first = row * HIDDEN
    left = tl.minimum(rows - row, ROWS).to(tl.int32)
    inside = is_inside(left, HIDDEN, GROUP, GROUPS, ROWS)
    filled = is_filled(left, HIDDEN, GROUP, GROUPS, ROWS)
    offsets = _offsets_by_8(GROUP, GROUPS, ROWS)
    dy = tl.load(dy_ptr + first + offsets, mask=inside, other=0.0)
    kept, headers = load_kept(
        kept_ptr, rows * HIDDEN, first, offsets, inside, filled, GROUP, ROWS * GROUPS, PACKED
    )
    rstd = _load_factors(rstd_ptr + row, left, ROWS)
    dsum = dy
    if dsum_ptr is not None:
        dsum = tl.load(dsum_ptr + first + offsets, mask=inside, other=0.0)
    return dy, dsum, kept, headers, rstd


@triton.jit
def _offsets_by_8(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return row_offsets(), of which the compiler knows 8 in a row: a thread then has 8 of them.

    So many halves are the 16 bytes that it has of them: codes that it has 16 of in a row would be
    passed on to other threads, through shared memory and two barriers.
    """
    lanes = tl.arange(0, GROUP)
    lanes = lanes // 8 * 8 + lanes % 8
    return tl.arange(0, ROWS * GROUPS)[:, None] * GROUP + lanes[None, :]


@triton.jit
def _load_factors(rstd_ptr, left, ROWS: tl.constexpr):
    """Return the factors of a tile's rows, of the one row a scalar."""
    if ROWS == 1:
        return tl.load(rstd_ptr)
    else:  # noqa: RET505 - the compiler types what it sees
        lanes = tl.arange(0, ROWS)
        return tl.load(rstd_ptr + lanes, mask=lanes < left, other=0.0)


@triton.jit
def _store_share(
    tile,
    share_ptr,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the sum of a tile's rows."""
    if ROWS > 1:
        tile = tl.sum(tl.reshape(tile, (ROWS, GROUPS, GROUP)), 0)
    columns = row_columns(GROUP, GROUPS, 1)
    known = columns < HIDDEN if HIDDEN != GROUPS * GROUP else None
    tl.store(share_ptr + columns, tile, mask=known)


@triton.jit(do_not_specialize=["rows"])
def column_sums_kernel(
    shares_ptr,
    out_ptr,
    rows,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write out[c] = sum of shares[:, c], in one order. A program owns COLUMNS columns.

    shares_ptr: fp32 [rows, HIDDEN]. out_ptr: [HIDDEN] of any type.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    lanes = tl.arange(0, ROWS)[:, None]
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)
    row = 0
    while row < rows:
        inside = (row + lanes < rows) & (columns < HIDDEN)
        totals += tl.load(shares_ptr + (row + lanes) * HIDDEN + columns, mask=inside, other=0.0)
        row += ROWS
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.sum(totals, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, total, mask=columns < HIDDEN)


@triton.jit(do_not_specialize=["rows"])
def norm_sums_kernel(
    dy_ptr,
    kept_ptr,
    dweight_ptr,
    dbias_ptr,
    rows: tl.int64,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write shares of dweight and dbias, for rows too long to be summed in norm_backward_kernel.

    Arguments as there. Program (i, j) owns columns i * GROUP to (i + 1) * GROUP of share j, and
    takes every num_programs(1)-th tile of ROWS rows.
    """
    columns = tl.program_id(0) * GROUP + tl.arange(0, GROUP)[None, :]
    lanes = tl.arange(0, ROWS)
    # None where no group is cut: then every access of a row is whole, or masked whole.
    known = columns < HIDDEN if HIDDEN % GROUP != 0 else None
    dweight = tl.zeros((ROWS, GROUP), tl.float32)
    dbias = tl.zeros((ROWS, GROUP), tl.float32)
    row = tl.program_id(1).to(tl.int64) * ROWS
    while row < rows:
        first = row * HIDDEN
        exists = lanes < tl.minimum(rows - row, ROWS).to(tl.int32)
        inside = exists[:, None] if known is None else exists[:, None] & known
        offsets = lanes[:, None] * HIDDEN + columns
        dy = load_rows(dy_ptr + first + offsets, inside)
        if dweight_ptr is not None:
            if PACKED:
                codes = tl.load(kept_ptr + first + offsets, mask=inside, other=0)
                n = codes.to(tl.int8, bitcast=True).to(tl.float32)
                header_ptr = header_pointer(kept_ptr, rows * HIDDEN, first, GROUP, 8, True)
                groups = lanes * (HIDDEN // GROUP) + tl.program_id(0)
                scale, _ = load_scale(header_ptr, groups, exists, True)
                n *= tl.where(exists, scale, 0.0)[:, None]
            else:
                n = load_rows(kept_ptr + first + offsets, inside)
            dweight += dy * n
        if dbias_ptr is not None:
            dbias += dy
        row += tl.num_programs(1).to(tl.int64) * ROWS
    columns = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    known = columns < HIDDEN if HIDDEN % GROUP != 0 else None
    share = tl.program_id(1) * HIDDEN + columns
    if dweight_ptr is not None:
        tl.store(dweight_ptr + share, tl.sum(dweight, 0), mask=known)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + share, tl.sum(dbias, 0), mask=known)
