"""RMSNorm and LayerNorm, backward: the sums over rows, of what programs left or apart.

In the terms of norm_backward.py, whose programs leave shares of dweight and dbias; where rows are
too long for that, shares are made here by a second pass over dy and what was kept. Each sum has one
order, and no two programs write a byte: there are no atomics. All arithmetic is float32. Traffic:
the shares once, 2 or 4 bytes each; a second pass reads 3.05 bytes an element in bf16 with 8 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.norm import load_rows
from vramx.kernels.tiles import unpack_groups


@triton.jit(do_not_specialize=["rows"])
def column_sums_kernel(
    shares_ptr, dweight_ptr, dbias_ptr, rows,
    HIDDEN: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dweight[c] = sum of shares[0, :, c], and dbias of what is next there, in one order.

    shares_ptr: [1 or 2, rows, HIDDEN], rows <= ROWS * STEPS. dweight_ptr, dbias_ptr: [HIDDEN] of
    any type, or one of them None. Program (i, j) owns COLUMNS columns of share j. The steps are
    written out, so that the loads of several are on their way at once.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = columns < HIDDEN
    lanes = tl.arange(0, ROWS)
    first = shares_ptr + tl.program_id(1).to(tl.int64) * rows * HIDDEN
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.static_range(STEPS):
        row = step * ROWS + lanes
        inside = (row < rows)[:, None] & known[None, :]
        at = row[:, None] * HIDDEN + columns[None, :]
        totals += load_rows(first + at, inside)
    total = tl.sum(totals, 0)
    if dweight_ptr is None:
        tl.store(dbias_ptr + columns, total.to(dbias_ptr.dtype.element_ty), mask=known)
    elif dbias_ptr is None:  # noqa: SIM114 - known to the compiler, what follows is not
        tl.store(dweight_ptr + columns, total.to(dweight_ptr.dtype.element_ty), mask=known)
    elif tl.program_id(1) == 0:
        tl.store(dweight_ptr + columns, total.to(dweight_ptr.dtype.element_ty), mask=known)
    else:
        tl.store(dbias_ptr + columns, total.to(dbias_ptr.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["rows"])
def norm_sums_kernel(
    dy_ptr, kept_ptr, dweight_ptr, dbias_ptr, rows: tl.int64,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write shares of dweight and dbias, for rows too long to be summed in norm_backward_kernel.

    Arguments as there. Program (i, j) owns columns i * GROUP to (i + 1) * GROUP of share j, and
    takes every num_programs(1)-th tile of ROWS rows.
    """
    columns = tl.arange(0, GROUP)[None, :]
    lanes = tl.arange(0, ROWS)
    # None where no group is cut: then every access of a row is whole, or masked whole.
    left = HIDDEN - tl.program_id(0) * GROUP
    known = columns < left if HIDDEN % GROUP != 0 else None
    dweight = tl.zeros((ROWS, GROUP), tl.float32)
    dbias = tl.zeros((ROWS, GROUP), tl.float32)
    row = tl.program_id(1).to(tl.int64) * ROWS
    while row < rows:
        first = row * HIDDEN + tl.program_id(0) * GROUP
        exists = lanes < tl.minimum(rows - row, ROWS).to(tl.int32)
        inside = exists[:, None] if known is None else exists[:, None] & known
        offsets = lanes[:, None] * HIDDEN + columns
        dy = load_rows(dy_ptr + first + offsets, inside)
        if dweight_ptr is not None:
            if PACKED:
                codes = tl.load(kept_ptr + first + offsets, mask=inside, other=0)
                groups = lanes * (HIDDEN // GROUP)
                n = unpack_groups(
                    codes, kept_ptr, rows * HIDDEN, first, groups, exists, GROUP, True
                )
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
