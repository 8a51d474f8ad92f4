"""Functions of angles in quarter turns, as kernels compute them, and the sign of a number."""

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
