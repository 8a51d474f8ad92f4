"""LayerNorm, backward, of rows that several warps share: one is summed while another is finished.

What a row's gradient needs of all of the row, its warps learn only behind a barrier. Here they come
to it with more than that to do: a program sums a row, and then finishes the one before it, whose
sums it has met the barrier for at the start. So memory is not idle while warps wait. In the terms
of norm.py, a tile being one row; norm_backward_launch.py says which rows come here and how many
programs there are, norm_sums.py adds up what they leave. There are no atomics, and each sum has one
order. All arithmetic is float32. Traffic an element in bf16 with 8 bits: 5.02 bytes; the shares
come on top.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.norm import (
    is_filled,
    is_inside,
    load_headers,
    load_rows,
    load_weight,
    normalise,
    offsets_by_8,
)
from vramx.kernels.norm_totals import lane_totals_of_two, spread_lanes, warp_sums_of_two


@triton.jit(do_not_specialize=["rows"])
def layer_norm_backward_kernel(
    dy_ptr,
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
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write dx and each program's share of dweight and dbias.

        g = dy * weight        dx = r * (g - n * mean(g n) - mean(g))
        dweight = sum dy * n   dbias = sum dy

    dy_ptr, dx_ptr: [rows, HIDDEN], of 16 bits. weight_ptr: or None. dweight_ptr, dbias_ptr: fp32
    [programs, HIDDEN], by halves as store_halves() says, or None.
    A program owns every programs-th row of dx, in ascending order, at least one, and its row of the
    shares. STAGES: how many rows are in work, all but one of them on their way to shared memory;
    the headers of the next are in registers, and those of the last row are loaded again. LANES: of
    the program.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = rows.to(tl.int32)
    inside = is_inside(1, HIDDEN, GROUP, GROUPS, 1)
    offsets = offsets_by_8(GROUP, GROUPS, 1)
    dweight = tl.zeros((GROUPS, GROUP), tl.float32)
    dbias = tl.zeros((GROUPS, GROUP), tl.float32)
    weight = load_weight(weight_ptr, HIDDEN, GROUP, GROUPS, 1)
    next_headers = _load_headers(kept_ptr, rows, program, HIDDEN, GROUP, GROUPS, PACKED)
    # Of the row before; there is none before the first, and nothing is written of it.
    g_before = tl.zeros((GROUPS, GROUP), tl.float32)
    n_before = tl.zeros((GROUPS, GROUP), tl.float32)
    sums_before = tl.zeros((LANES // 16,), tl.float32)
    rstd_before = 0.0
    for row in tl.range(program, count, programs, num_stages=STAGES):
        headers = next_headers
        next_headers = _load_headers(
            kept_ptr, rows, tl.minimum(row + programs, count - 1), HIDDEN, GROUP, GROUPS, PACKED
        )
        rstd = tl.load(rstd_ptr + row)
        first = row * tl.full((), HIDDEN, tl.int64)
        dy = load_rows(dy_ptr + first + offsets, inside)
        kept = tl.load(kept_ptr + first + offsets, mask=inside, other=0)
        totals = lane_totals_of_two(sums_before, LANES)
        n = normalise(kept, headers, PACKED)
        if dweight_ptr is not None:
            dweight += dy * n
        if dbias_ptr is not None:
            dbias += dy
        g = dy if weight_ptr is None else dy * weight.to(tl.float32)
        sums = warp_sums_of_two(g * n, g, LANES)
        dx = _gradient(g_before, n_before, rstd_before, totals, HIDDEN, LANES)
        before = first - programs.to(tl.int64) * HIDDEN
        known = inside & (row >= programs)
        tl.store(dx_ptr + before + offsets, dx.to(dx_ptr.dtype.element_ty), mask=known)
        g_before, n_before, sums_before, rstd_before = g, n, sums, rstd
    if dweight_ptr is not None:
        store_halves(dweight, dweight_ptr + program * HIDDEN, HIDDEN)
    if dbias_ptr is not None:
        store_halves(dbias, dbias_ptr + program * HIDDEN, HIDDEN)
    last = program + (count - 1 - program) // programs * programs
    totals = lane_totals_of_two(sums_before, LANES)
    dx = _gradient(g_before, n_before, rstd_before, totals, HIDDEN, LANES)
    dx_ptr += last.to(tl.int64) * HIDDEN
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(g, n, rstd, totals, HIDDEN: tl.constexpr, LANES: tl.constexpr):
    """Return r * (g - n * mean(g n) - mean(g)) of a row, of which each lane has both totals."""
    UNITS: tl.constexpr = g.shape[0] * g.shape[1] // 8
    by_mean = rstd / HIDDEN
    along, total = totals
    along, total = (
        spread_lanes(along * by_mean, UNITS, LANES), spread_lanes(total * by_mean, UNITS, LANES)
    )  # fmt: skip
    dx = tl.reshape(g, (UNITS, 8)) * rstd - total - tl.reshape(n, (UNITS, 8)) * along
    return tl.reshape(dx, (g.shape[0], g.shape[1]))


@triton.jit
def _load_headers(
    kept_ptr,
    rows,
    row,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return the headers of a row, if PACKED."""
    if PACKED:
        filled = is_filled(1, HIDDEN, GROUP, GROUPS, 1)
        first = row * tl.full((), HIDDEN, tl.int64)
        return load_headers(kept_ptr, rows * HIDDEN, first, filled, GROUP, GROUPS)
    else:  # noqa: RET505 - the compiler types what it sees
        return row


@triton.jit
def store_halves(share, share_ptr, HIDDEN: tl.constexpr):
    """Write fp32[HIDDEN] of a tile of one row: the first 4 of every 8 columns, then the others.

    A thread has 8 in a row. Stored in order, its 16 bytes at a time would lie 32 apart, and moving
    them between threads first takes eight barriers; by halves those of a warp lie side by side.
    """
    UNITS: tl.constexpr = share.shape[0] * share.shape[1] // 8
    halves = tl.trans(tl.reshape(share, (UNITS, 2, 4)), (0, 2, 1))
    low, high = tl.split(halves)
    units = tl.arange(0, UNITS)[:, None]
    known = units * 8 < HIDDEN if HIDDEN != UNITS * 8 else None
    share_ptr += units * 4 + tl.arange(0, 4)[None, :]
    tl.store(share_ptr, low, mask=known)
    tl.store(share_ptr + HIDDEN // 2, high, mask=known)
