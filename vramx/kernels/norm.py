"""RMSNorm and LayerNorm, forward and backward, and their output again from what was kept.

All kernels see a row of HIDDEN elements as GROUPS groups of GROUP: GROUPS is a power of two, and
what of it lies beyond HIDDEN is masked. A tile is ROWS rows, [ROWS * GROUPS, GROUP]; more than one
row only where HIDDEN = GROUPS * GROUP, so that they follow each other in memory. A row is read
once and stays in registers. What is kept of a row is its normalised form n (no weight, no bias) and
one factor r = rstd: n either packed to 8 bits, symmetric, in the bytes and with the noise of
quantize.py (PACKED), or in the type of the input.

    s = x + residual, rounded to the type of x        r = 1 / sqrt(mean (s - m)**2 + eps)
    n = (s - m) * r                                   m = mean s if CENTRED, else 0
    y = n * weight + bias

All arithmetic is float32. Any pointer that may be null is None, which the compiler knows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.headers import greatest_magnitude, header_pointer, load_scale, symmetric_header
from vramx.kernels.noise import code_bits, rounding_noise


@triton.jit
def _columns(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return int32[ROWS * GROUPS, GROUP]: the column of each element of a tile."""
    groups = tl.arange(0, ROWS * GROUPS) % GROUPS
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _offsets(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return int32[ROWS * GROUPS, GROUP]: how far from the first element of a tile each lies."""
    return tl.arange(0, ROWS * GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _offsets_by_8(GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return _offsets(), of which the compiler knows 8 in a row: a thread then has 8 of them.

    So many halves are the 16 bytes that it has of them: codes that it has 16 of in a row would be
    passed on to other threads, through shared memory and two barriers.
    """
    lanes = tl.arange(0, GROUP)
    lanes = lanes // 8 * 8 + lanes % 8
    return tl.arange(0, ROWS * GROUPS)[:, None] * GROUP + lanes[None, :]


@triton.jit
def _inside(
    left, HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the mask of a tile of which `left` rows exist; True where nothing is masked."""
    # No function returns None before Triton 3.7; a mask that is all ones costs nothing.
    if ROWS > 1:
        return (tl.arange(0, ROWS * GROUPS) < left * GROUPS)[:, None]
    elif HIDDEN != GROUPS * GROUP:  # noqa: RET505 - the compiler types what it sees
        return _offsets(GROUP, GROUPS, ROWS) < HIDDEN
    else:
        return tl.full((ROWS * GROUPS, 1), 1, tl.int1)


@triton.jit
def _filled(
    left, HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the mask of a tile's groups; HIDDEN is a multiple of GROUP."""
    groups = tl.arange(0, ROWS * GROUPS)
    if ROWS > 1:
        return groups < left * GROUPS
    else:  # noqa: RET505 - the compiler types what it sees
        return groups * GROUP < HIDDEN


@triton.jit
def _load(pointers, inside):
    """Return what lies there as fp32, 0 outside."""
    if inside is None:
        return tl.load(pointers).to(tl.float32)
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _row_totals(tile, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return fp32[ROWS], the sum of each row of a tile, or of the one row a scalar."""
    if ROWS == 1:  # which every thread then has, and nothing is spread through shared memory
        return tl.sum(tile)
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.sum(tl.reshape(tl.sum(tile, 1), (ROWS, GROUPS)), 1)


@triton.jit
def _spread(values, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return a value of each row as what multiplies a tile by rows; of one row it is a scalar."""
    if ROWS == 1:
        return values
    else:  # noqa: RET505 - the compiler types what it sees
        wide = tl.broadcast_to(values[:, None], (ROWS, GROUPS))
        return tl.reshape(wide, (ROWS * GROUPS,))[:, None]


@triton.jit(do_not_specialize=["rows", "stream", "eps"])
def norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    kept_ptr,
    rstd_ptr,
    seed_ptr,
    rows: tl.int64,
    stream: tl.int64,
    eps,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    PACKED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
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
    inside = _inside(left, HIDDEN, GROUP, GROUPS, ROWS)
    offsets = _offsets(GROUP, GROUPS, ROWS)
    s = _load(x_ptr + first + offsets, inside)
    if residual_ptr is not None:
        total = (s + _load(residual_ptr + first + offsets, inside)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + first + offsets, total, mask=inside)
        s = total.to(tl.float32)
    if CENTRED:
        s -= _spread(_row_totals(s, GROUPS, ROWS) / HIDDEN, GROUPS, ROWS)
        s = tl.where(inside, s, 0.0)
    rstd = tl.rsqrt(_row_totals(s * s, GROUPS, ROWS) / HIDDEN + eps)
    n = s * _spread(rstd, GROUPS, ROWS)
    if kept_ptr is not None:
        lanes = tl.arange(0, ROWS)
        tl.store(rstd_ptr + row + lanes, rstd, mask=lanes < left)
        if PACKED:
            _store_packed(
                n, kept_ptr, seed_ptr, rows * HIDDEN, stream, first, inside,
                _filled(left, HIDDEN, GROUP, GROUPS, ROWS), GROUP, ROWS * GROUPS, STOCHASTIC,
            )  # fmt: skip
        else:
            kept = n.to(kept_ptr.dtype.element_ty)
            tl.store(kept_ptr + first + offsets, kept, mask=inside)
    y = _affine(n, weight_ptr, bias_ptr, HIDDEN, GROUP, GROUPS, ROWS)
    tl.store(y_ptr + first + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_packed(
    n,
    buffer_ptr,
    seed_ptr,
    numel,
    stream,
    first,
    inside,
    filled,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Write the codes and headers of a tile whose first element is `first` (int64)."""
    groups = tl.arange(0, TILE_GROUPS)
    scale, inverse = symmetric_header(greatest_magnitude(n), 127)
    header_ptr = header_pointer(buffer_ptr, numel, first, GROUP, 8, True)
    tl.store(header_ptr + groups, (scale >> 16).to(tl.int16), mask=filled)
    quotient = n * inverse[:, None]
    if STOCHASTIC:
        quotient += rounding_noise(seed_ptr, stream, first // 8, TILE_GROUPS, GROUP)
    offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(buffer_ptr + first + offsets, code_bits(quotient).to(tl.uint8), mask=inside)


@triton.jit
def _affine(
    n,
    weight_ptr,
    bias_ptr,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return n * weight + bias, either of which may be None."""
    columns = _columns(GROUP, GROUPS, ROWS)
    known = columns < HIDDEN if HIDDEN != GROUPS * GROUP else None
    if weight_ptr is not None:
        n = n * _load(weight_ptr + columns, known)
    if bias_ptr is not None:
        n = n + _load(bias_ptr + columns, known)
    return n


@triton.jit
def _load_kept(
    kept_ptr,
    numel,
    first,
    offsets,
    inside,
    filled,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return what was kept of a tile, 0 outside, and if PACKED its headers, as they lie there."""
    kept = tl.load(kept_ptr + first + offsets, mask=inside, other=0)
    if PACKED:
        header_ptr = header_pointer(kept_ptr, numel, first, GROUP, 8, True)
        # Not any number outside: its product with 0 may be NaN.
        return kept, tl.load(header_ptr + tl.arange(0, TILE_GROUPS), mask=filled, other=0)
    else:  # noqa: RET505 - the compiler types what it sees
        return kept, kept


@triton.jit
def _normalised(kept, headers, PACKED: tl.constexpr):
    """Return n of a tile as fp32, of what _load_kept() returned."""
    if PACKED:
        scale = (headers.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return kept.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
    else:  # noqa: RET505 - the compiler types what it sees
        return kept.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def norm_output_kernel(
    kept_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows: tl.int64,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write y = n * weight + bias. Arguments as norm_forward_kernel's; a program owns ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = row * HIDDEN
    left = tl.minimum(rows - row, ROWS).to(tl.int32)
    inside = _inside(left, HIDDEN, GROUP, GROUPS, ROWS)
    filled = _filled(left, HIDDEN, GROUP, GROUPS, ROWS)
    offsets = _offsets(GROUP, GROUPS, ROWS)
    kept, headers = _load_kept(
        kept_ptr, rows * HIDDEN, first, offsets, inside, filled, GROUP, ROWS * GROUPS, PACKED
    )
    n = _normalised(kept, headers, PACKED)
    y = _affine(n, weight_ptr, bias_ptr, HIDDEN, GROUP, GROUPS, ROWS)
    tl.store(y_ptr + first + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


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
        n = _normalised(kept, headers, PACKED)
        if dweight_ptr is not None:
            dweight += dy * n
        if dbias_ptr is not None:
            dbias += dy
        dx = _gradient(
            dy, n, rstd, weight_ptr, HIDDEN, GROUP, GROUPS, ROWS, CENTRED, FACTOR_FIRST=AHEAD
        )
        row = tile * tl.full((), ROWS, tl.int64)
        left = tl.minimum(rows - row, ROWS).to(tl.int32)
        inside = _inside(left, HIDDEN, GROUP, GROUPS, ROWS)
        offsets = row * HIDDEN + _offsets(GROUP, GROUPS, ROWS)
        if dsum_ptr is not None:
            dx += dsum.to(tl.float32) if AHEAD else _load(dsum_ptr + offsets, inside)
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
    columns = _columns(GROUP, GROUPS, ROWS)
    known = columns < HIDDEN if HIDDEN != GROUPS * GROUP else None
    factor = _spread(rstd, GROUPS, ROWS)
    g = dy * factor if FACTOR_FIRST else dy
    if weight_ptr is not None:
        g = g * _load(weight_ptr + columns, known)
    dx = g - n * _spread(_row_totals(g * n, GROUPS, ROWS) / HIDDEN, GROUPS, ROWS)
    if CENTRED:
        dx -= _spread(_row_totals(g, GROUPS, ROWS) / HIDDEN, GROUPS, ROWS)
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
    inside = _inside(left, HIDDEN, GROUP, GROUPS, ROWS)
    filled = _filled(left, HIDDEN, GROUP, GROUPS, ROWS)
    offsets = _offsets_by_8(GROUP, GROUPS, ROWS)
    dy = tl.load(dy_ptr + first + offsets, mask=inside, other=0.0)
    kept, headers = _load_kept(
        kept_ptr, rows * HIDDEN, first, offsets, inside, filled, GROUP, ROWS * GROUPS, PACKED
    )
    rstd = _load_factors(rstd_ptr + row, left, ROWS)
    dsum = dy
    if dsum_ptr is not None:
        dsum = tl.load(dsum_ptr + first + offsets, mask=inside, other=0.0)
    return dy, dsum, kept, headers, rstd


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
    columns = _columns(GROUP, GROUPS, 1)
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
        dy = _load(dy_ptr + first + offsets, inside)
        if dweight_ptr is not None:
            if PACKED:
                codes = tl.load(kept_ptr + first + offsets, mask=inside, other=0)
                n = codes.to(tl.int8, bitcast=True).to(tl.float32)
                header_ptr = header_pointer(kept_ptr, rows * HIDDEN, first, GROUP, 8, True)
                groups = lanes * (HIDDEN // GROUP) + tl.program_id(0)
                scale, _ = load_scale(header_ptr, groups, exists, True)
                n *= tl.where(exists, scale, 0.0)[:, None]
            else:
                n = _load(kept_ptr + first + offsets, inside)
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
