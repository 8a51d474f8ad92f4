"""Cross entropy of rows of logits, and its gradient written over them.

With l = logits, or c tanh(logits / c) with a softcap c, V classes, target y and smoothing e:
    loss = log sum_v exp(l_v) - (1 - e) l_y - e / V sum_v l_v
    dlogits_v = (softmax(l)_v - (1 - e) [v = y] - e / V) * (1 - (l_v / c)**2) * weight

A program owns every programs-th row and reads it twice, a block at a time: the maximum and the sum
of exponentials in the first pass, the gradient in the second, which finds the row in the L2 cache
where the launcher has so few programs that all of their rows fit there. fp32 in registers. A target
that is neither a class nor the ignored one gives NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    """Return c tanh(x / c), of exponentials that cannot overflow: tanh is 1 - 2 / (1 + exp 2a)."""
    if CAPPED:
        return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (x / cap))))
    else:  # noqa: RET505 - the compiler types what it sees: no dead return
        return x


@triton.jit(do_not_specialize=["rows", "ignored"])
def cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    weights_ptr,
    rows,
    row_stride: tl.int64,
    classes,
    ignored: tl.int64,
    smoothing: tl.float32,
    cap: tl.float32,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Write losses and, if GRADIENT, dlogits over the logits.

    logits_ptr: bf16, fp16 or fp32 [rows, classes], rows row_stride apart. targets_ptr: int64
    [rows]; a row whose target is `ignored` has loss 0 and gradient 0. losses_ptr: fp32 [rows].
    weights_ptr: fp32 [rows], factors of the gradient; any pointer unless WEIGHTED.
    """
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        _row(
            logits_ptr + row * row_stride, targets_ptr + row, losses_ptr + row, weights_ptr + row,
            classes, ignored, smoothing, cap, LANES, CAPPED, SMOOTHED, GRADIENT, WEIGHTED,
        )  # fmt: skip


@triton.jit
def _row(
    logits_ptr,
    target_ptr,
    loss_ptr,
    weight_ptr,
    classes,
    ignored,
    smoothing,
    cap,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Do one row, to whose first logit, target, loss and weight the pointers point."""
    target = tl.load(target_ptr)
    if target == ignored:
        tl.store(loss_ptr, 0.0)
        if GRADIENT:
            for start in range(0, classes, LANES * 8):
                places = start + _places(LANES)
                zeros = tl.zeros((LANES, 8), logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + places, zeros, mask=places < classes)
    else:
        wrong = (target < 0) | (target >= classes)
        # Read before any gradient is written: the reductions between have barriers.
        own_ptr = logits_ptr + tl.where(wrong, 0, target)
        chosen = _capped(tl.load(own_ptr).to(tl.float32), cap, CAPPED)
        log_sum, total = _row_sums(logits_ptr, classes, cap, LANES, CAPPED, SMOOTHED)
        log_sum = tl.where(wrong, float("nan"), log_sum)
        loss = log_sum - (1.0 - smoothing) * chosen
        rest = 0.0
        if SMOOTHED:
            rest = smoothing / classes
            loss -= rest * total
        tl.store(loss_ptr, loss)
        if GRADIENT:
            weight = tl.load(weight_ptr) if WEIGHTED else None
            _row_gradient(logits_ptr, classes, log_sum, rest, cap, weight, LANES, CAPPED)
            own = _slope(chosen, log_sum, rest + (1.0 - smoothing), cap, weight, CAPPED)
            tl.debug_barrier()  # after the row's gradient, in which the target is a class like any
            tl.store(own_ptr, own.to(logits_ptr.dtype.element_ty))


@triton.jit
def _places(LANES: tl.constexpr):
    """Return int32[LANES, 8]: a lane's 8 logits are one access of 16 bytes in bf16."""
    return tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _row_sums(
    logits_ptr,
    classes,
    cap,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
):
    """Return log sum exp of a row and, if SMOOTHED, the sum of its logits."""
    # Each lane of 8 has its own maximum and sum: one reduction of all at the end instead of one a
    # block, and one exponential more for 8.
    top = tl.full((LANES,), float("-inf"), tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    whole = classes // (LANES * 8) * (LANES * 8)
    for start in range(0, whole, LANES * 8):
        x = tl.load(logits_ptr + start + _places(LANES)).to(tl.float32)
        x = _capped(x, cap, CAPPED)
        if SMOOTHED:
            total += tl.sum(x, 1)
        top, sums = _add_block(top, sums, x)
    places = whole + _places(LANES)
    inside = places < classes
    x = tl.load(logits_ptr + places, mask=inside, other=0.0).to(tl.float32)
    x = _capped(x, cap, CAPPED)
    if SMOOTHED:
        total += tl.sum(tl.where(inside, x, 0.0), 1)
    top, sums = _add_block(top, sums, tl.where(inside, x, float("-inf")))
    base = _base(tl.max(top, 0))
    log_sum = base + tl.log(tl.sum(sums * _exp(top - base), 0))
    return log_sum, tl.sum(total, 0)


@triton.jit
def _exp(x):
    """Return exp(x), 0 where that is a denormal number: 2 instructions, and 5 for those."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _base(top):
    """Return what to subtract of logits: nothing where none was finite, for -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _add_block(top, sums, x):
    """Return the lanes' maxima and their sums of exp(x - _base(maximum)), with x added."""
    higher = tl.maximum(top, tl.max(x, 1))
    base = _base(higher)
    return higher, sums * _exp(top - base) + tl.sum(_exp(x - base[:, None]), 1)


@triton.jit
def _slope(x, log_sum, missing, cap, weight, CAPPED: tl.constexpr):
    """Return the gradient of logits that are x when capped."""
    gradient = _exp(x - log_sum) - missing
    if CAPPED:
        part = x / cap
        gradient *= 1.0 - part * part
    if weight is not None:
        gradient *= weight
    return gradient


@triton.jit
def _row_gradient(
    logits_ptr,
    classes,
    log_sum,
    rest,
    cap,
    weight,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Write the gradient of a row without a target over its logits."""
    whole = classes // (LANES * 8) * (LANES * 8)
    for start in range(0, whole, LANES * 8):
        pointers = logits_ptr + start + _places(LANES)
        x = _capped(tl.load(pointers).to(tl.float32), cap, CAPPED)
        gradient = _slope(x, log_sum, rest, cap, weight, CAPPED)
        tl.store(pointers, gradient.to(logits_ptr.dtype.element_ty))
    places = whole + _places(LANES)
    inside = places < classes
    x = tl.load(logits_ptr + places, mask=inside, other=0.0).to(tl.float32)
    gradient = _slope(_capped(x, cap, CAPPED), log_sum, rest, cap, weight, CAPPED)
    tl.store(logits_ptr + places, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
