"""Cross entropy of rows of logits, and its gradient written over them.

With l = logits, or c tanh(logits / c) with a softcap c, V classes, target y and smoothing e:
    loss = log sum_v exp(l_v) - (1 - e) l_y - e / V sum_v l_v
    dlogits_v = (softmax(l)_v - (1 - e) [v = y] - e / V) * (1 - (l_v / c)**2) * weight

One program owns one row and reads it twice, a block at a time: the maximum, the sum of exponentials
and the target's logit in the first pass, the gradient in the second, which finds the row in the L2
cache. fp32 in registers. A target that is neither a class nor the ignored one gives NaN.
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


@triton.jit(do_not_specialize=["ignored"])
def cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    weights_ptr,
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
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    if target == ignored:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, classes, LANES * 8):
                places = start + _places(LANES)
                zeros = tl.zeros((LANES, 8), logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + places, zeros, mask=places < classes)
    else:
        log_sum, chosen, total = _row_sums(
            logits_ptr, target, classes, cap, LANES, CAPPED, SMOOTHED
        )
        loss = log_sum - (1.0 - smoothing) * chosen
        if SMOOTHED:
            loss -= smoothing / classes * total
        wrong = (target < 0) | (target >= classes)
        loss = tl.where(wrong, float("nan"), loss)
        tl.store(losses_ptr + row, loss)
        if GRADIENT:
            factor = tl.where(wrong, float("nan"), 1.0)
            if WEIGHTED:
                factor *= tl.load(weights_ptr + row)
            _row_gradient(
                logits_ptr, target, classes, log_sum, smoothing, cap, factor,
                LANES, CAPPED, SMOOTHED,
            )  # fmt: skip


@triton.jit
def _row_sums(
    logits_ptr,
    target,
    classes,
    cap,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
):
    """Return log sum exp, the target's logit, and the sum of the logits."""
    # Each lane of 8 has its own maximum and sum: one reduction of all at the end instead of one a
    # block, and one exponential more for 8.
    top = tl.full((LANES,), float("-inf"), tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    chosen = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, classes, LANES * 8):
        places = start + _places(LANES)
        inside = places < classes
        x = tl.load(logits_ptr + places, mask=inside, other=0.0).to(tl.float32)
        x = _capped(x, cap, CAPPED)
        chosen += tl.sum(tl.where(places == target, x, 0.0), 1)
        if SMOOTHED:
            total += tl.sum(tl.where(inside, x, 0.0), 1)
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        # Nothing is subtracted from a lane that has seen no finite number: -inf - -inf is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    log_sum = base + tl.log(tl.sum(sums * tl.exp(top - base), 0))
    return log_sum, tl.sum(chosen, 0), tl.sum(total, 0)


@triton.jit
def _places(LANES: tl.constexpr):
    """Return int32[LANES, 8]: a lane's 8 logits are one access of 16 bytes in bf16."""
    return tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _row_gradient(
    logits_ptr,
    target,
    classes,
    log_sum,
    smoothing,
    cap,
    factor,
    LANES: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
):
    """Write a row's gradient over its logits."""
    for start in range(0, classes, LANES * 8):
        places = start + _places(LANES)
        inside = places < classes
        x = tl.load(logits_ptr + places, mask=inside, other=0.0).to(tl.float32)
        x = _capped(x, cap, CAPPED)
        gradient = tl.exp(x - log_sum) - tl.where(places == target, 1.0 - smoothing, 0.0)
        if SMOOTHED:
            gradient -= smoothing / classes
        if CAPPED:
            part = x / cap
            gradient *= 1.0 - part * part
        gradient = (gradient * factor).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + places, gradient, mask=inside)
