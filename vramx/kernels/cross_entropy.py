"""Cross entropy of rows of logits, and its gradient written over them.

With l = logits, or c tanh(logits / c) with a softcap c, V classes, target y and smoothing e:
    loss = log sum_v exp(l_v) - (1 - e) l_y - e / V sum_v l_v
    dlogits_v = (softmax(l)_v - (1 - e) [v = y] - e / V) * (1 - (l_v / c)**2) * weight

A row is cut into pieces, a program each, which reads its piece once and holds it in registers: the
programs tell each other their maxima and sums (cross_entropy_pieces.py) and write the gradient of
what they hold. fp32 in registers, but for logits of 16 bits, which are held two in a word. A target
that is neither a class nor the ignored one gives NaN.

A piece is some tiles, of 16 bytes for each thread, from the multiple of 16 bytes at or before a
row's first logit. The logits that share 16 bytes with another row, its edges, are read and written
one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.cross_entropy_pieces import base_of, combine, exp, receive, send


@triton.jit(do_not_specialize=["ignored", "zero"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, weights_ptr, mail_ptr, row_stride: tl.int64, classes,
    ignored: tl.int64, smoothing: tl.float32, cap: tl.float32, zero: tl.int32,
    PIECES: tl.constexpr, TILES: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, GRADIENT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write losses and, if GRADIENT, dlogits over the logits; a program owns a piece of a row.

    logits_ptr: bf16, fp16 or fp32 [rows, classes], rows row_stride apart. targets_ptr: int64
    [rows]; a row whose target is `ignored` has loss 0 and gradient 0. losses_ptr: fp32 [rows].
    weights_ptr: fp32 [rows], factors of the gradient; any pointer unless WEIGHTED. mail_ptr: int64
    zeros, for each row what send() says; null if PIECES is 1. zero: 0. SHIFTED: unless all rows
    begin and end at multiples of 16 bytes. Grid: rows * PIECES, a row's pieces side by side.
    """
    row = tl.program_id(0) // PIECES
    piece = tl.program_id(0) % PIECES
    begin = row * row_stride
    shift = (begin % WIDTH).to(tl.int32) if SHIFTED else 0
    # Divided and multiplied for the compiler to see a multiple of 16 bytes.
    row_ptr = logits_ptr + begin // WIDTH * WIDTH
    span = piece * (TILES * THREADS * WIDTH), shift, shift + classes
    # Of ignored rows too: it would take a trip to memory to learn which they are.
    held = _read(row_ptr, span, TILES, THREADS, WIDTH, SHIFTED)
    edges = _read_edges(row_ptr, span, TILES, THREADS, WIDTH) if SHIFTED else None
    target = tl.load(targets_ptr + row)
    if target == ignored:
        if piece == 0:
            tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            _write_zeros(row_ptr, span, TILES, THREADS, WIDTH, SHIFTED)
    else:
        _do_piece(
            row_ptr, losses_ptr + row, weights_ptr + row, mail_ptr, row, piece, span, held, edges,
            target, smoothing, cap, zero, PIECES, THREADS, WIDTH, CAPPED, SMOOTHED, GRADIENT,
            WEIGHTED,
        )  # fmt: skip


@triton.jit
def _do_piece(
    row_ptr, loss_ptr, weight_ptr, mail_ptr, row, piece, span, held, edges, target, smoothing, cap,
    zero,
    PIECES: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr, GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Do a piece of a row that counts.

    span: of row_ptr's logits, where the piece begins, where the row does, and where the row ends.
    edges: None where rows have none.
    """
    classes = span[2] - span[1]
    wrong = (target < 0) | (target >= classes)
    own = span[1] + tl.where(wrong, 0, target).to(tl.int32)
    is_owner = own // (len(held) * THREADS * WIDTH) == piece
    # Read before any gradient is written: the reductions between have barriers.
    chosen = tl.load(row_ptr + own, mask=is_owner, other=0.0).to(tl.float32)
    chosen = _capped(chosen, cap, CAPPED)
    found = _sums(row_ptr, held, edges, span, cap, zero, THREADS, WIDTH, CAPPED, SMOOTHED)
    if PIECES > 1:
        mail_ptr += row.to(tl.int64) * (PIECES * PIECES * (2 if SMOOTHED else 1))
        send(mail_ptr, piece, found, PIECES, THREADS, SMOOTHED)
        found = receive(mail_ptr, piece, PIECES, THREADS, SMOOTHED)
    top, sums = found[0], tl.where(wrong, float("nan"), found[1])
    rest = smoothing / classes if SMOOTHED else 0.0
    if is_owner:
        loss = top + tl.log(sums) - (1.0 - smoothing) * chosen
        if SMOOTHED:
            loss -= rest * found[2]
        tl.store(loss_ptr, loss)
    if GRADIENT:
        weight = tl.load(weight_ptr) if WEIGHTED else 1.0
        slope = base_of(top), weight / sums, weight * rest, cap
        _write(row_ptr, held, edges, span, slope, zero, THREADS, WIDTH, CAPPED)
        if is_owner:
            slope = slope[0], slope[1], weight * (rest + (1.0 - smoothing)), cap
            gradient = _gradient(chosen, slope, CAPPED).to(row_ptr.dtype.element_ty)
            tl.debug_barrier()  # after the gradient in which the target is a class like any
            tl.store(row_ptr + own, gradient)


# -- Tiles -----------------------------------------------------------------------------------------


@triton.jit
def _tile(span, tile, THREADS: tl.constexpr, WIDTH: tl.constexpr, SHIFTED: tl.constexpr):
    """Return the places of a tile, int32[THREADS, WIDTH], and which accesses have no other row's.

    An access is a thread's, so its mask is [THREADS, 1].
    """
    begins = span[0] + tile * (THREADS * WIDTH) + tl.arange(0, THREADS)[:, None] * WIDTH
    own = begins < span[2]
    if SHIFTED:
        own = (begins >= span[1]) & (begins + WIDTH <= span[2])
    return begins + tl.arange(0, WIDTH)[None, :], own


@triton.jit
def _edges(span, TILES: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """Return places, int32[THREADS], and which are of the piece and in an access of two rows.

    Of the row's first access, and of its last where that is another.
    """
    i = tl.arange(0, THREADS)
    last = span[2] // WIDTH * WIDTH
    places = tl.where(i < WIDTH, i, last + i - WIDTH)
    firsts = tl.where((span[1] > 0) | (last == 0), WIDTH, 0)
    lasts = tl.where(last > 0, 2 * WIDTH, 0)
    of_two = (i < firsts) | ((i >= WIDTH) & (i < lasts))
    in_row = (places >= span[1]) & (places < span[2])
    in_piece = (places >= span[0]) & (places < span[0] + TILES * THREADS * WIDTH)
    return places, of_two & in_row & in_piece


@triton.jit
def _read(
    ptr, span,
    TILES: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return a tuple of tiles, as _packed() makes them, without edges; beyond the row is -inf."""
    held = ()
    for tile in tl.static_range(TILES):
        places, own = _tile(span, tile, THREADS, WIDTH, SHIFTED)
        x = tl.load(ptr + places, mask=own, other=float("-inf"))
        held = held + (_packed(x),)  # type: ignore[assignment]  # noqa: RUF005
    return held


@triton.jit
def _read_edges(ptr, span, TILES: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """Return fp32[THREADS]: an edge a thread; -inf where there is none."""
    places, inside = _edges(span, TILES, THREADS, WIDTH)
    return tl.load(ptr + places, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _packed(x):
    """Return logits of 16 bits two in a word, or others.

    As the compiler would hold them for itself, a logit of 16 bits takes a register.
    """
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    if bits == 16:
        pairs = tl.reshape(x.to(tl.uint16, bitcast=True), (x.shape[0], x.shape[1] // 2, 2))
        low, high = tl.split(pairs)
        return (low.to(tl.uint32) | (high.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)
    else:  # noqa: RET505 - as in _capped
        return x


@triton.jit
def _unpacked(words, ptr, zero):
    """Return fp32 logits of a tile.

    With a zero that the compiler does not know to be one, different for each use: it would hold the
    result of the first use for the second, in twice the registers.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    if bits == 16:
        if dtype == tl.bfloat16:
            low = (words * (65536 + zero)).to(tl.float32, bitcast=True)
            high = (words & (zero ^ -65536)).to(tl.float32, bitcast=True)
        else:
            words ^= zero
            low = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1] * 2))
    else:  # noqa: RET505 - as in _capped
        return (words.to(tl.int32, bitcast=True) ^ zero).to(tl.float32, bitcast=True)


# -- Sums ------------------------------------------------------------------------------------------


@triton.jit
def _sums(
    ptr, held, edges, span, cap, zero,
    THREADS: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """Return maximum, sum of exp(l - base_of(maximum)) and, if SMOOTHED, of logits."""
    # The maximum first, a thread for itself: all tiles are on their way by then.
    top = tl.full((THREADS,), float("-inf"), tl.float32)
    for tile in tl.static_range(len(held)):
        top = tl.maximum(top, tl.max(_unpacked(held[tile], ptr, 0), 1))
    if edges is not None:
        top = tl.maximum(top, edges)
    top = _capped(top, cap, CAPPED)
    base = base_of(top)
    sums = tl.zeros((THREADS,), tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    for tile in tl.static_range(len(held)):
        x = _capped(_unpacked(held[tile], ptr, 2 * zero), cap, CAPPED)
        own = _tile(span, tile, THREADS, WIDTH, edges is not None)[1]
        if SMOOTHED:
            total += tl.sum(tl.where(own, x, 0.0), 1)
        if CAPPED:
            x = tl.where(own, x, float("-inf"))
        sums += tl.sum(exp(x - base[:, None]), 1)
    if edges is not None:
        x = _capped(edges, cap, CAPPED)
        inside = _edges(span, len(held), THREADS, WIDTH)[1]
        if SMOOTHED:
            total += tl.where(inside, x, 0.0)
        if CAPPED:
            x = tl.where(inside, x, float("-inf"))
        sums += exp(x - base)
    top, all_sums = combine(top, sums)
    return top, all_sums, tl.sum(total, 0)


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    """Return c tanh(x / c), of exponentials that cannot overflow: tanh is 1 - 2 / (1 + exp 2a)."""
    if CAPPED:
        return cap * (1.0 - 2.0 / (1.0 + exp(x * (2.0 / cap))))
    else:  # noqa: RET505 - the compiler types what it sees: no dead return
        return x


# -- Gradients -------------------------------------------------------------------------------------


@triton.jit
def _gradient(x, slope, CAPPED: tl.constexpr):
    """Return the gradient of logits that are x when capped.

    slope: what to subtract of logits, factor of exponentials, what to subtract of them, and cap.
    """
    gradient = exp(x - slope[0]) * slope[1] - slope[2]
    if CAPPED:
        part = x * (1.0 / slope[3])
        gradient *= 1.0 - part * part
    return gradient


@triton.jit
def _write(
    ptr, held, edges, span, slope, zero,
    THREADS: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a piece without a target over its logits."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    for tile in tl.static_range(len(held)):
        places, own = _tile(span, tile, THREADS, WIDTH, edges is not None)
        x = _capped(_unpacked(held[tile], ptr, zero), slope[3], CAPPED)
        tl.store(ptr + places, _gradient(x, slope, CAPPED).to(dtype), mask=own)
    if edges is not None:
        places, inside = _edges(span, len(held), THREADS, WIDTH)
        gradient = _gradient(_capped(edges, slope[3], CAPPED), slope, CAPPED)
        tl.store(ptr + places, gradient.to(dtype), mask=inside)


@triton.jit
def _write_zeros(
    ptr, span,
    TILES: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a piece of a row that does not count."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    for tile in tl.static_range(TILES):
        places, own = _tile(span, tile, THREADS, WIDTH, SHIFTED)
        tl.store(ptr + places, tl.zeros((THREADS, WIDTH), dtype), mask=own)
    if SHIFTED:
        places, inside = _edges(span, TILES, THREADS, WIDTH)
        tl.store(ptr + places, tl.zeros((THREADS,), dtype), mask=inside)
