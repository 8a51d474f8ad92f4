"""Device functions for the headers of groups: scale and minimum, made, stored and read.

Each is inlined into its kernel and works on one value a group. The results are fixed to the bit, so
that every kernel and the reference agree. Only what Triton's compiler and its interpreter both have
is used: no libdevice, no inline assembly. Infinities and NaN are found here, by one comparison a
group: minima and maxima are taken so that they keep a NaN, of integers or by greatest_magnitude().
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def header_pointer(
    buffer_ptr,
    numel,
    first,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Return a pointer to the header of the group that begins with element `first` (int64).

    The headers begin at Layout.code_bytes of the buffer: int16 if SYMMETRIC, else int32.
    """
    groups = (numel.to(tl.int64) + (GROUP - 1)) // GROUP
    code_bytes = (groups * (GROUP * BITS // 8) + 15) // 16 * 16
    headers = buffer_ptr + code_bytes
    if SYMMETRIC:
        return headers.to(tl.pointer_type(tl.int16)) + first // GROUP
    else:  # noqa: RET505 - the compiler types what it sees: no dead return may follow
        return headers.to(tl.pointer_type(tl.int32)) + first // GROUP


@triton.jit
def magnitude_key(x):
    """Map fp32 to int32 so that integers compare as the magnitudes do; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _greater(a, b):
    """Return the maximum, NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest_magnitude(x):
    """Return the greatest magnitude_key of each row, by one instruction an element."""
    return magnitude_key(tl.reduce(tl.abs(x), 1, _greater))


@triton.jit
def symmetric_header(largest, LEVELS: tl.constexpr):
    """Return the bits of the scale and 1 / scale.

    largest: int32, the greatest magnitude_key of each group.
    """
    scale = _scale_bits(largest.to(tl.float32, bitcast=True), LEVELS)
    return scale, tl.div_rn(1.0, scale.to(tl.float32, bitcast=True))


@triton.jit
def asymmetric_header(top, bottom, nearest, LEVELS: tl.constexpr):
    """Return the bits of the scale, 1 / scale, and the bits of the minimum.

    top: int32, the signed maximum of each group's bits. bottom, nearest: uint32, the unsigned
    maximum and minimum. Integers order floats of one sign by magnitude and those without a sign
    first: so top is the maximum unless all are negative, then nearest is; and bottom is the minimum
    unless none is negative, then nearest is. The minimum is rounded down, so that no element lies
    below it; the range is counted from there.
    """
    nearest = nearest.to(tl.int32, bitcast=True)
    bottom = bottom.to(tl.int32, bitcast=True)
    high = tl.where(top < 0, nearest, top)
    low = tl.where(bottom < 0, bottom, nearest)
    # +0 and -0 are one minimum: which of them a group holds must not show in its header.
    low = tl.where(low == -0x80000000, 0, low)
    low = (low + ((low >> 31) & 0xFFFF)) & -0x10000
    span = high.to(tl.float32, bitcast=True) - low.to(tl.float32, bitcast=True)
    scale = _scale_bits(span, LEVELS)
    return scale, tl.div_rn(1.0, scale.to(tl.float32, bitcast=True)), low


@triton.jit
def _scale_bits(peak, LEVELS: tl.constexpr):
    """Return the bits of the scale, a bfloat16 above peak / LEVELS; NaN if peak is not finite.

    Rounding up, and 2**-20 more, keep each code within LEVELS without a clamp. The floor of 2**-126
    keeps 1 / scale finite.
    """
    bits = (peak * (1.00000095367431640625 / LEVELS)).to(tl.int32, bitcast=True)
    rounded = tl.maximum((bits + 0xFFFF) & -0x10000, 0x00800000)
    return tl.where(magnitude_key(peak) >= 0x7F800000, 0x7FC00000, rounded)


@triton.jit
def load_scale(header_ptr, offsets, mask, SYMMETRIC: tl.constexpr):
    """Return the scale and the minimum of each group as fp32; the minimum is 0 if SYMMETRIC."""
    words = tl.load(header_ptr + offsets, mask=mask).to(tl.int32)
    scale = (words << 16).to(tl.float32, bitcast=True)
    if SYMMETRIC:
        return scale, tl.zeros_like(scale)
    return scale, (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def decode(codes, scale, low, SYMMETRIC: tl.constexpr):
    """Return codes * scale + low: fp32, the product exact, so that a fused one is no other."""
    if SYMMETRIC:
        return codes * scale
    return codes * scale + low


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Cast fp32 to the tensor's type; float16 saturates instead of overflowing, NaN stays NaN."""
    if dtype == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
