"""Functions of results of tanh and sigmoid, as kernels compute them, and the sign of a number.

Angles are in quarter turns. Logarithms are those that float32's bits are: right at powers of two
and linear between, so that the way back is one of bits, too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def with_sign_of(magnitude, x):
    """Return a number that is not negative, or NaN, with the sign of another."""
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (magnitude.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def arcsine(x):
    """Return arcsin(x) in quarter turns for x in [0, 1]; NaN above.

    Relative error 3e-7. Source: asinf of Cephes (Moshier), the polynomial for x up to a half; above
    it arcsin(x) is a quarter turn less twice the arcsine of sqrt((1 - x) / 2).
    """
    is_large = x > 0.5
    square = tl.where(is_large, 0.5 - 0.5 * x, x * x)
    root = tl.where(is_large, tl.sqrt(square), x)
    p = 4.2163199048e-2 * square + 2.4181311049e-2
    p = p * square + 4.5470025998e-2
    p = p * square + 7.4953002686e-2
    p = p * square + 1.6666752422e-1
    turns = (root + root * square * p) * 0.6366197723675814  # 2 / pi
    return tl.where(is_large, 1.0 - 2.0 * turns, turns)


@triton.jit
def sine(turns):
    """Return the sine of quarter turns in [0, 2]; error 2e-7, and none at 0 and 1.

    Source: Taylor's series up to half a quarter turn; beyond, 1 - 2 sin(h)**2 of half of what is
    left to a whole one, which is negative beyond it.
    """
    is_large = turns > 0.5
    half = tl.where(is_large, 0.5 - 0.5 * turns, turns) * 1.5707963267948966
    square = half * half
    p = 2.7557319224e-6 * square - 1.9841269841e-4
    p = p * square + 8.3333333333e-3
    p = p * square - 1.6666666667e-1
    small = half + half * square * p
    return tl.where(is_large, 1.0 - 2.0 * small * small, small)


@triton.jit
def number_of_end(distance):
    """Return 2 sqrt(d) - 1 for d, how many powers of two a distance in (0, 1] is from 1.

    d is at least 1; NaN stays NaN.
    """
    bits = 0x3F800000 - distance.to(tl.int32, bitcast=True)
    return 2.0 * tl.sqrt(bits.to(tl.float32) * 1.1920928955078125e-7) - 1.0


@triton.jit
def end_of_number(size):
    """Return the distance of which number_of_end() made a number of 1 or more; 0 of the least."""
    root = 0.5 * size + 0.5
    bits = 0x3F800000 - (root * root * 8388608.0).to(tl.int32)
    return tl.where(bits < 0x01000000, 0, bits).to(tl.float32, bitcast=True)


@triton.jit
def number_of_tanh(y):
    """Return what stands for a result of tanh: of its distance from 1; 2 y up to a half."""
    size = tl.abs(y)
    distance = 1.0 - size
    distance = tl.where(distance < 7.450580596923828e-9, 7.450580596923828e-9, distance)
    return with_sign_of(tl.where(size < 0.5, 2.0 * size, number_of_end(distance)), y)


@triton.jit
def tanh_of_number(number):
    """Return what number_of_tanh() made a number of."""
    size = tl.abs(number)
    return with_sign_of(tl.where(size >= 1.0, 1.0 - end_of_number(size), 0.5 * size), number)


@triton.jit
def number_of_sigmoid(y):
    """Return what stands for a result of sigmoid: of twice its distance from 1, or from 0 with a
    negative sign; 4 y - 2 between a quarter and three."""
    other = 1.0 - y
    other = tl.where(other < 7.450580596923828e-9, 7.450580596923828e-9, other)
    distance = tl.where(y < 0.5, y, other)
    size = tl.where(distance > 0.25, 2.0 - 4.0 * distance, number_of_end(2.0 * distance))
    return with_sign_of(size, y - 0.5)


@triton.jit
def sigmoid_of_number(number):
    """Return what number_of_sigmoid() made a number of."""
    size = tl.abs(number)
    distance = tl.where(size >= 1.0, 0.5 * end_of_number(size), 0.5 - 0.25 * size)
    return tl.where(number < 0.0, distance, 1.0 - distance)
