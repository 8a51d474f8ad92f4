"""What is of a channel in normalisation by channel: the work between two passes over tensors.

    rstd = rsqrt(var + eps)                                        before the forward pass
    running_mean, running_var, tracked                             with it, where they are kept
    slope = rstd * weight, (offset, along) = sums * slope / count  before the backward pass
    dweight, dbias = sums                                          with it

Few thousand numbers: a launch's time. In one kernel each, since torch's own operations would be a
launch for each word above. Computed in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["channels", "eps", "momentum", "unbiased"])
def channel_norm_statistics_kernel(
    mean_ptr, var_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, channels,
    eps: tl.float32, momentum: tl.float32, unbiased: tl.float32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rstd, and move running statistics towards what was found, unless they are None.

    mean_ptr, var_ptr, rstd_ptr: fp32 [channels]. running_mean_ptr, running_var_ptr: [channels] of
    any type, or None both. tracked_ptr: int64 [1], one is added; or None. unbiased: what makes the
    variance that of a sample. A program owns BLOCK channels.
    """
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = here < channels
    mean = tl.load(mean_ptr + here, mask=inside, other=0.0)
    var = tl.load(var_ptr + here, mask=inside, other=1.0)
    tl.store(rstd_ptr + here, tl.rsqrt(var + eps), mask=inside)
    if running_mean_ptr is not None:
        _move(running_mean_ptr + here, mean, momentum, inside)
        _move(running_var_ptr + here, var * unbiased, momentum, inside)
    if tracked_ptr is not None:  # noqa: SIM102 - the compiler leaves out what depends on it
        if tl.program_id(0) == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def _move(pointers, new, momentum, inside):
    """Interpolate as torch.lerp() does: by the formula that is exact at the nearer end."""
    new = new.to(pointers.dtype.element_ty).to(tl.float32)
    old = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    step = new - old
    moved = tl.where(tl.abs(momentum) < 0.5, old + momentum * step, new - step * (1.0 - momentum))
    tl.store(pointers, moved, mask=inside)


@triton.jit(do_not_specialize=["rows", "channels", "count"])
def channel_norm_factors_kernel(
    shares_ptr, rstd_ptr, weight_ptr, factors_ptr, dweight_ptr, dbias_ptr, rows, channels,
    count: tl.float32,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add shares up and write the factors of dx, and the gradients of weight and bias.

    shares_ptr: fp32 [2, rows, channels], of the sums of g and of g n; rows are added in tiles of
    ROWS, always in the same order. rstd_ptr: fp32 [channels]. weight_ptr: [channels] or None.
    factors_ptr: fp32 [3, channels]: slope, offset and along. dweight_ptr, dbias_ptr: [channels] of
    any type, or None. A program owns BLOCK channels, which divide theirs.
    """
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, ROWS)
    totals = tl.zeros((ROWS, BLOCK), tl.float32)
    along = tl.zeros((ROWS, BLOCK), tl.float32)
    row = 0
    while row < rows:
        inside = (row + lanes < rows)[:, None]
        places = (row + lanes)[:, None] * channels + here[None, :]
        totals += tl.load(shares_ptr + places, mask=inside, other=0.0)
        along += tl.load(shares_ptr + rows * channels + places, mask=inside, other=0.0)
        row += ROWS
    total, product = tl.sum(totals, 0), tl.sum(along, 0)
    slope = tl.load(rstd_ptr + here)
    if weight_ptr is not None:
        slope = slope * tl.load(weight_ptr + here).to(tl.float32)
    mean_slope = slope / count
    tl.store(factors_ptr + here, slope)
    tl.store(factors_ptr + channels + here, total * mean_slope)
    tl.store(factors_ptr + 2 * channels + here, product * mean_slope)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + here, product)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + here, total)
