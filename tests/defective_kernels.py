"""Device functions of the codec's kernels that are wrong, for the time of a call.

Each is an error that somebody could make and that a look at a few values would not show.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from vramx.kernels import headers, mapped, quantize4, tiles
from vramx.kernels import noise as noise_functions

_right_header = headers.outlier_header


@triton.jit
def _scale_to_nearest(peak, LEVELS: tl.constexpr):
    bits = (peak * (1.00000095367431640625 / LEVELS)).to(tl.int32, bitcast=True)
    rounded = tl.maximum((bits + 0x8000) & -0x10000, 0x00800000)
    return tl.where((bits & 0x7FFFFFFF) >= 0x7F800000, 0x7FC00000, rounded)


@triton.jit
def _scale_loses_nan(peak, LEVELS: tl.constexpr):
    bits = (peak * (1.00000095367431640625 / LEVELS)).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits + 0xFFFF) & -0x10000, 0x00800000), 0x7F7F0000)


@triton.jit
def _round_half_away(quotient):
    return tl.floor(quotient + 0.5).to(tl.int32)


@triton.jit
def _philox_of_six_rounds(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(6):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_2 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_2.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _fixed_point_cut(quotient, ZERO: tl.constexpr):
    return tl.floor((quotient + ZERO) * 256).to(tl.int32)


@triton.jit
def _always_finite(magnitude):
    return magnitude < 0


@triton.jit
def _decode_shifted(codes, scale, first, second):
    return (codes.to(tl.float32) + 0.0078125) * scale


@triton.jit
def _first_for_both(codes, scale, first, second):
    x = codes.to(tl.float32) * scale
    return tl.where((codes == 127) | (codes == -128), first, x)


@triton.jit
def _outliers_in_the_scale(key):
    first = tl.max(key, 1)
    second, word, _, _ = _right_header(key)
    scale = headers._scale_bits((first >> 1).to(tl.float32, bitcast=True), 126)
    return second, word, scale, tl.div_rn(1.0, scale.to(tl.float32, bitcast=True))


@triton.jit
def _as_it_is(x, left, ROWS: tl.constexpr, GROUP: tl.constexpr):
    return x


@triton.jit
def _unbounded(x, low, high):
    return x


@triton.jit
def _factor_of_anything(rstd_ptr, BACK: tl.constexpr):
    rstd = tl.load(rstd_ptr)
    return 1.0 / rstd if BACK else rstd


@triton.jit
def _arcsine_of_one_series(x):
    square = x * x
    p = 4.2163199048e-2 * square + 2.4181311049e-2
    p = p * square + 4.5470025998e-2
    p = p * square + 7.4953002686e-2
    p = p * square + 1.6666752422e-1
    return (x + x * square * p) * 0.6366197723675814


DEFECTS: dict[str, tuple[tuple[ModuleType, ...], str, Any]] = {
    "scale rounded to nearest": ((headers,), "_scale_bits", _scale_to_nearest),
    "NaN not kept": ((headers,), "_scale_bits", _scale_loses_nan),
    "NaN of an outlier not kept": ((headers,), "not_finite", _always_finite),
    "half rounded away": ((tiles, quantize4), "code_bits", _round_half_away),
    "noise added to a cut quotient": ((tiles, quantize4), "fixed_point_bits", _fixed_point_cut),
    "six rounds of Philox": ((noise_functions,), "philox", _philox_of_six_rounds),
    "decoded with an offset": ((tiles,), "decode_with_outliers", _decode_shifted),
    "one outlier for both": ((tiles,), "decode_with_outliers", _first_for_both),
    "the end repeated unmapped": ((mapped,), "_within", _as_it_is),
    "arguments as they are": ((mapped,), "_between", _unbounded),
    "any deviation used": ((mapped,), "_factor", _factor_of_anything),
    "one series for all angles": ((mapped,), "arcsine", _arcsine_of_one_series),
    "outliers in the scale": ((tiles,), "outlier_header", _outliers_in_the_scale),
}
