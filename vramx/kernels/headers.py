"""Device functions for the headers of groups: scale, outliers and minimum, made, stored and read.

Each is inlined into its kernel and works on one value a group. The results are fixed to the bit, so
that every kernel and the reference agree. Only what Triton's compiler and its interpreter both have
is used: no libdevice, no inline assembly. Infinities and NaN are found here, by one comparison a
group: minima and maxima are taken of integers, which keep a NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def header_pointer(
    buffer_ptr, numel, first, GROUP: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr
):
    """Return a pointer to the header of the group that begins with element `first` (int64).

    An int16, the scale, if SYMMETRIC; else an int32. At 8 bits outlier_pointer() has the rest.
    """
    groups = (numel.to(tl.int64) + (GROUP - 1)) // GROUP
    headers = buffer_ptr + (groups * (GROUP * BITS // 8) + 15) // 16 * 16
    if SYMMETRIC:
        if BITS == 8:
            headers += groups * 4
        return headers.to(tl.pointer_type(tl.int16)) + first // GROUP
    else:  # noqa: RET505 - the compiler types what it sees: no dead return may follow
        return headers.to(tl.pointer_type(tl.int32)) + first // GROUP


@triton.jit
def outlier_pointer(buffer_ptr, numel, first, GROUP: tl.constexpr):
    """Return a pointer to the two outliers of a group, an int32; 8 bits, symmetric."""
    groups = (numel.to(tl.int64) + (GROUP - 1)) // GROUP
    outliers = buffer_ptr + (groups * GROUP + 15) // 16 * 16
    return outliers.to(tl.pointer_type(tl.int32)) + first // GROUP


@triton.jit
def magnitude_key(x):
    """Map fp32 to int32 so that integers compare as the magnitudes do; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def not_finite(magnitude):
    """Tell whether a magnitude_key is that of an infinity or a NaN."""
    return magnitude >= 0x7F800000


@triton.jit
def symmetric_header(largest, LEVELS: tl.constexpr):
    """Return the bits of the scale and 1 / scale.

    largest: int32, the greatest magnitude_key of each group.
    """
    scale = _scale_bits(largest.to(tl.float32, bitcast=True), LEVELS)
    return scale, tl.div_rn(1.0, scale.to(tl.float32, bitcast=True))


@triton.jit
def signed_key(x):
    """Map fp32 to uint32, one to one, so that integers compare as the magnitudes do.

    The sign is the lowest bit: the key of the largest magnitude is its number again.
    """
    bits = x.to(tl.uint32, bitcast=True)
    return (bits << 1) | (bits >> 31)


@triton.jit
def outlier_header(key):
    """Return of each group the key of the second outlier, the word of both, and of the other
    elements the bits of the scale and 1 / scale.

    key: uint32[ROWS, GROUP], signed_key() of the elements. The outliers are the two different
    numbers of the largest magnitudes. Those that are not finite count as one, which is NaN: others
    of the group, as of a row beside one with a NaN, come back all the same.
    """
    # A difference below zero wraps to the top, so the greatest is that of the next key below, in
    # two instructions. Where none is below it is a key above: then no element is scaled.
    # The least key of what is not finite stands for all of them: all of them are above `second`.
    first = tl.minimum(tl.max(key, 1), 0xFF000000)
    second = tl.max(key - first[:, None], 1) + first
    peak = tl.max(key - second[:, None], 1) + second
    peak = (peak >> 1).to(tl.float32, bitcast=True)
    one, two = _bfloat16_bits(first) >> 16, _bfloat16_bits(second) & 0xFFFF0000
    one = tl.where(not_finite((first >> 1).to(tl.int32, bitcast=True)), 0x7FC0, one)
    two = tl.where(not_finite((second >> 1).to(tl.int32, bitcast=True)), 0x7FC00000, two)
    word = (one | two).to(tl.int32, bitcast=True)
    scale = _scale_bits(peak, 126)
    return second, word, scale, tl.div_rn(1.0, scale.to(tl.float32, bitcast=True))


@triton.jit
def _bfloat16_bits(key):
    """Return the bits of a signed_key's number, uint32, rounded to bfloat16: in the upper half."""
    bits = (key >> 1) | (key << 31)
    return bits + (0x7FFF + ((bits >> 16) & 1))


@triton.jit
def mark_outliers(codes, key, second):
    """Return the codes, int32, with the marks of the outliers in their places.

    The second one's is 0x7F; a key above is the first's, and its mark is one more.
    """
    marks = tl.minimum(key + (0x7F - second)[:, None], 0x80)
    return tl.where(key >= second[:, None], marks.to(tl.int32, bitcast=True), codes)


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
    return tl.where(not_finite(magnitude_key(peak)), 0x7FC00000, rounded)


@triton.jit
def load_words(pointers, mask):
    """Return integers of 2 or 4 bytes as int32, 0 where the mask is not set."""
    if mask is None:
        return tl.load(pointers).to(tl.int32)
    else:  # noqa: RET505 - the compiler types what it sees
        return tl.load(pointers, mask=mask, other=0).to(tl.int32)


@triton.jit
def load_scale(pointers, mask, SYMMETRIC: tl.constexpr):
    """Return the scale and the minimum of each group as fp32; the minimum is 0 if SYMMETRIC."""
    words = load_words(pointers, mask)
    scale = (words << 16).to(tl.float32, bitcast=True)
    if SYMMETRIC:
        return scale, tl.zeros_like(scale)
    return scale, (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def load_outliers(pointers, mask):
    """Return the outliers of each group as fp32."""
    words = load_words(pointers, mask)
    first = (words << 16).to(tl.float32, bitcast=True)
    return first, (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def decode(codes, scale, low, SYMMETRIC: tl.constexpr):
    """Return codes * scale + low: fp32, the product exact, so that a fused one is no other."""
    if SYMMETRIC:
        return codes * scale
    return codes * scale + low


@triton.jit
def decode_with_outliers(codes, scale, first, second):
    """Return fp32 of codes, int8; the others are of their groups, as fp32 to be broadcast."""
    x = tl.where(codes == 127, second, codes.to(tl.float32) * scale)
    return tl.where(codes == -128, first, x)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Cast fp32 to the tensor's type; float16 saturates instead of overflowing, NaN stays NaN."""
    if dtype == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
