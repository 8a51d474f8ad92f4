"""What the child of interpreted_kernels.py runs: calls by name, and defects that can be planted.

A defect replaces one device function by a wrong one for the time of a call. Each is an error that
somebody could make and that a look at a few values would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from interpreted_kernels import _GUARD_BYTES, Noise, _poisoned, mask_bytes
from torch import Tensor

from vramx.kernels import headers, launch, mapped, quantize4, tiles
from vramx.kernels import noise as noise_functions
from vramx.kernels.layout import Layout


def _inside(guarded: Tensor) -> Tensor:
    return guarded[_GUARD_BYTES : guarded.numel() - _GUARD_BYTES]


def _quantize(flat: Tensor, layout: Layout, noise: Noise | None) -> Tensor:
    guarded = _poisoned(layout.buffer_bytes)
    state = None if noise is None else noise.state()
    stream = 0 if noise is None else noise.stream
    launch.quantize(flat, _inside(guarded), layout, noise=state, stream=stream)
    return guarded


def _dequantize(buffer: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    guarded = _poisoned(layout.numel * dtype.itemsize)
    launch.dequantize(buffer, _inside(guarded).view(dtype), layout)
    return guarded


def _quantize_map(
    flat: Tensor, layout: Layout, function: launch.Function, noise: Noise | None
) -> Tensor:
    guarded = _poisoned(layout.buffer_bytes)
    state = None if noise is None else noise.state()
    stream = 0 if noise is None else noise.stream
    launch.quantize_map(flat, _inside(guarded), layout, function, noise=state, stream=stream)
    return guarded


def _dequantize_map(
    buffer: Tensor, layout: Layout, function: launch.Function, dtype: torch.dtype
) -> Tensor:
    guarded = _poisoned(layout.numel * dtype.itemsize)
    launch.dequantize_map(buffer, _inside(guarded).view(dtype), layout, function)
    return guarded


def _pack_signs(flat: Tensor) -> Tensor:
    guarded = _poisoned(mask_bytes(flat.numel()))
    launch.pack_signs(flat, _inside(guarded))
    return guarded


def _unpack_signs(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    guarded = _poisoned(numel * dtype.itemsize)
    launch.unpack_signs(buffer, _inside(guarded).view(dtype))
    return guarded


def _pack_mask(flags: Tensor) -> Tensor:
    guarded = _poisoned(mask_bytes(flags.numel()))
    launch.pack_mask(flags, _inside(guarded))
    return guarded


def _unpack_mask(buffer: Tensor, numel: int) -> Tensor:
    guarded = _poisoned(numel)
    launch.unpack_mask(buffer, _inside(guarded).view(torch.bool))
    return guarded


@triton.jit
def _noise_kernel(
    out_ptr, seed_ptr, stream: tl.int64, block_ptr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    rows = tl.arange(0, ROWS)[:, None]
    block = tl.load(block_ptr)  # an argument would have the width of its value here
    values = noise_functions.rounding_noise(seed_ptr, stream, block, ROWS, COLS)
    tl.store(out_ptr + rows * COLS + tl.arange(0, COLS)[None, :], values)


def _noise(block: int, rows: int, cols: int, noise: Noise) -> Tensor:
    out = torch.full((rows * cols,), torch.nan)
    _noise_kernel[(1,)](
        out, noise.state(), noise.stream, torch.tensor([block]), ROWS=rows, COLS=cols
    )
    return out


CALLS: dict[str, Callable[..., Any]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "quantize_map": _quantize_map,
    "dequantize_map": _dequantize_map,
    "pack_signs": _pack_signs,
    "unpack_signs": _unpack_signs,
    "pack_mask": _pack_mask,
    "unpack_mask": _unpack_mask,
    "noise": _noise,
    "supported": lambda device: launch.supported(torch.device(device)),
}


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
def _fixed_point_cut(quotient):
    return tl.floor(quotient * 256).to(tl.int32) + 4096


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


_DEFECTS: dict[str, tuple[tuple[ModuleType, ...], str, Any]] = {
    "scale rounded to nearest": ((headers,), "_scale_bits", _scale_to_nearest),
    "NaN not kept": ((headers,), "_scale_bits", _scale_loses_nan),
    "NaN of an outlier not kept": ((headers,), "not_finite", _always_finite),
    "half rounded away": ((tiles, quantize4), "code_bits", _round_half_away),
    "noise added to a cut quotient": ((quantize4,), "fixed_point_bits", _fixed_point_cut),
    "six rounds of Philox": ((noise_functions,), "philox", _philox_of_six_rounds),
    "decoded with an offset": ((tiles,), "decode_with_outliers", _decode_shifted),
    "one outlier for both": ((tiles,), "decode_with_outliers", _first_for_both),
    "the end repeated unmapped": ((mapped,), "_within", _as_it_is),
    "arguments as they are": ((mapped,), "_between", _unbounded),
    "any deviation used": ((mapped,), "_factor", _factor_of_anything),
    "one series for all angles": ((mapped,), "_arcsine", _arcsine_of_one_series),
    "outliers in the scale": ((tiles,), "outlier_header", _outliers_in_the_scale),
}


@contextmanager
def planted(defect: str) -> Iterator[None]:
    """Plant a defect for a while; none for an empty name."""
    if not defect:
        yield
        return
    modules, name, wrong = _DEFECTS[defect]
    right = getattr(modules[0], name)
    for module in modules:
        setattr(module, name, wrong)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, name, right)
