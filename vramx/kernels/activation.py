"""Activation functions that keep a packed copy of their input, and their backward.

    forward     y = act(x)                     and the packed form of x, in one read of x
    backward    dx = dy * act'(x)              from the packed x; act(x) as well, where wanted
    ReLU        keeps the sign of x, a bit an element; bit k of byte j is element 8 j + k

    silu        x s(x),  s(x) = 1 / (1 + exp(-x))
    gelu        x (1 + erf(x / sqrt 2)) / 2
    gelu_tanh   x s(2 u),  u = sqrt(2 / pi) (x + 0.044715 x**3): (1 + tanh u) / 2 = s(2 u)

A program owns ROWS groups, as in quantize.py; no two programs share a byte. fp32 in registers.
Traffic an element in bf16 with 8 bits: 5.016 bytes forward, 5.016 backward, 7.016 with act(x). With
4 bits a tile is two halves, as in quantize4.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.quantize4 import load_halves, pack_halves, store_halves, unpack_halves
from vramx.kernels.tiles import load_tile, pack_tile, store_tile, unpack_tile


@triton.jit
def _logistic(x):
    """Return 1 / (1 + exp(-x)), to 2**-21 of itself."""
    gate, _ = _logistics(x)
    return gate


@triton.jit
def _logistics(x):
    """Return 1 / (1 + exp(-x)), and 1 / (1 + exp(x)), in which nothing cancels.

    exp2 and rsqrt are an instruction each, where exp takes 5 and a quotient 8, for numbers that are
    denormal. Where exp(-x) overflows the first is 0, and so is the second: what it stands beside.
    """
    power = tl.exp2(-1.4426950408889634 * x)
    root = tl.rsqrt(1.0 + power)
    gate = root * root
    return gate, tl.minimum(power, 3e38) * gate


@triton.jit
def _normal(x):
    """Return the normal distribution's Phi(x), to 2e-7.

    The logarithm of a tail is close to a polynomial, so that no division is needed, and nothing
    cancels for negative x: to -6.5 the tail is right to 5e-4 of itself, and beyond goes to 0. The
    polynomial is ours: weighted least squares, log2 Phi(-x) for x in [0, 6.5].
    """
    distance = tl.abs(x)
    power = -5.486832606038661e-07 * distance + 9.812425560085103e-06
    power = power * distance - 3.5663913877215236e-05
    power = power * distance - 0.0005218096193857491
    power = power * distance + 0.007587008643895388
    power = power * distance - 0.0528658889234066
    power = power * distance - 0.4590863287448883
    power = power * distance - 1.1511197090148926
    tail = tl.exp2(power * distance - 0.9999997019767761)
    # An integer: the compiler would narrow a comparison of floats to one of bfloat16 pairs.
    return tl.where(x.to(tl.int32, bitcast=True) < 0, tail, 1.0 - tail)


@triton.jit
def _gelu_of_halves(x):
    """Return x Phi(x) to 2**-14 of itself and 2**-24: an eighth of fp16's rounding, or less.

    max(x, 0) - |x| Phi(-|x|), the tail as _normal() has it, of a smaller degree, by minimax. That
    of 16 is 0, so -inf gives 0, the limit, where a product would be NaN.
    """
    distance = tl.minimum(tl.abs(x), 16.0)
    power = -0.00037700068787671626 * distance + 0.00634816475212574
    power = power * distance - 0.04989856854081154
    power = power * distance - 0.4619899392127991
    power = power * distance - 1.1501151323318481
    tail = tl.exp2(power * distance - 1.0000557899475098)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - distance * tail


@triton.jit
def value_of(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """Return act(x) of fp32, as exact as what is rounded to dtype needs it."""
    if KIND == "silu":
        return x * _logistic(x)
    elif KIND == "gelu":  # noqa: RET505 - the compiler types what it sees: no dead return
        return x * _normal(x) if dtype == tl.float32 else _gelu_of_halves(x)
    else:
        return x * _logistic(x * (1.5957691216057308 + 0.07135481282553407 * x * x))


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """Return act(x) and its derivative, of fp32."""
    if KIND == "silu":
        gate, rest = _logistics(x)
        value = x * gate
        slope = gate + value * rest
    elif KIND == "gelu":
        gate = _normal(x)
        value = x * gate
        slope = gate + 0.3989422804014327 * x * tl.exp2(-0.7213475204444817 * x * x)
    else:
        square = x * x
        gate, rest = _logistics(x * (1.5957691216057308 + 0.07135481282553407 * square))
        value = x * gate
        slope = gate + value * rest * (1.5957691216057308 + 0.2140644384766022 * square)
    return value, slope


@triton.jit(do_not_specialize=["numel", "stream"])
def activation_kernel(
    x_ptr, y_ptr, buffer_ptr, seed_ptr, numel: tl.int64, stream: tl.int64,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TAIL_ROWS: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write y = act(x) and, if BITS is 8 or 4, the packed x.

    x_ptr, y_ptr: bf16, fp16 or fp32 [numel]; they may be one if BITS is 0. buffer_ptr: uint8
    [Layout.buffer_bytes]; any pointer if BITS is 0. seed_ptr: int64[2], seed and epoch; any pointer
    unless STOCHASTIC. numel: > 0.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _activation_tile(
            x_ptr, y_ptr, buffer_ptr, seed_ptr, stream, numel, first, left,
            KIND, BITS, ROWS, GROUP, SYMMETRIC, STOCHASTIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _activation_tile(
                x_ptr, y_ptr, buffer_ptr, seed_ptr, stream, numel, first + row * GROUP,
                left - row * GROUP, KIND, BITS, TAIL_ROWS, GROUP, SYMMETRIC, STOCHASTIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _activation_tile(
    x_ptr, y_ptr, buffer_ptr, seed_ptr, stream, numel, first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if BITS == 4:
        a, b = load_halves(x_ptr + first, left, ROWS, GROUP, MASKED)
        value_a = value_of(a, KIND, y_ptr.dtype.element_ty)
        value_b = value_of(b, KIND, y_ptr.dtype.element_ty)
        store_halves(y_ptr + first, value_a, value_b, left, ROWS, GROUP, MASKED)
        pack_halves(
            a, b, buffer_ptr, seed_ptr, stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip
    else:
        x = load_tile(x_ptr + first, left, ROWS, GROUP, MASKED)
        y = value_of(x, KIND, y_ptr.dtype.element_ty)
        store_tile(y_ptr + first, y, left, ROWS, GROUP, MASKED)
        if BITS == 8:
            pack_tile(
                x, buffer_ptr, seed_ptr, stream, numel, first, left,
                ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["numel"])
def activation_backward_kernel(
    dy_ptr, kept_ptr, dx_ptr, y_ptr, numel: tl.int64,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TAIL_ROWS: tl.constexpr, SYMMETRIC: tl.constexpr, WITH_VALUE: tl.constexpr,
):  # fmt: skip
    """Write dx = dy * act'(x) and, if WITH_VALUE, y = act(x).

    dy_ptr, dx_ptr: bf16, fp16 or fp32 [numel]. kept_ptr: the packed x, or x itself if BITS is 0;
    then dx_ptr may be it: a tile is read before it is written. And so y_ptr, [numel], may be
    dy_ptr; any pointer unless WITH_VALUE.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _activation_backward_tile(
            dy_ptr, kept_ptr, dx_ptr, y_ptr, numel, first, left,
            KIND, BITS, ROWS, GROUP, SYMMETRIC, WITH_VALUE, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _activation_backward_tile(
                dy_ptr, kept_ptr, dx_ptr, y_ptr, numel, first + row * GROUP, left - row * GROUP,
                KIND, BITS, TAIL_ROWS, GROUP, SYMMETRIC, WITH_VALUE, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def kept_tile(
    kept_ptr, numel, first, left,
    BITS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return fp32[ROWS, GROUP] of what was kept: packed if BITS is 8, as it was if 0, else 0."""
    if BITS == 8:
        return unpack_tile(kept_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
    elif BITS == -1:  # noqa: RET505 - the compiler types what it sees: no dead return
        return tl.zeros((ROWS, GROUP), tl.float32)
    else:
        return load_tile(kept_ptr + first, left, ROWS, GROUP, MASKED)


@triton.jit
def _activation_backward_tile(
    dy_ptr, kept_ptr, dx_ptr, y_ptr, numel, first, left,
    KIND: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, WITH_VALUE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if BITS == 4:
        dy_a, dy_b = load_halves(dy_ptr + first, left, ROWS, GROUP, MASKED)
        a, b = unpack_halves(kept_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
        value_a, slope_a = value_and_slope(a, KIND)
        value_b, slope_b = value_and_slope(b, KIND)
        store_halves(dx_ptr + first, dy_a * slope_a, dy_b * slope_b, left, ROWS, GROUP, MASKED)
        if WITH_VALUE:
            store_halves(y_ptr + first, value_a, value_b, left, ROWS, GROUP, MASKED)
    else:
        dy = load_tile(dy_ptr + first, left, ROWS, GROUP, MASKED)
        x = kept_tile(kept_ptr, numel, first, left, BITS, ROWS, GROUP, SYMMETRIC, MASKED)
        value, slope = value_and_slope(x, KIND)
        store_tile(dx_ptr + first, dy * slope, left, ROWS, GROUP, MASKED)
        if WITH_VALUE:
            store_tile(y_ptr + first, value, left, ROWS, GROUP, MASKED)


@triton.jit(do_not_specialize=["numel"])
def relu_kernel(x_ptr, y_ptr, bits_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write y = max(x, 0), NaN kept, and the bits of not x <= 0; a program owns BYTES bytes.

    x_ptr, y_ptr: bf16, fp16 or fp32 [numel]. bits_ptr: uint8 [ceil(numel / 8)], bits beyond the
    last element are 0. numel: > 0.
    """
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    if left == BYTES * 8:
        _relu_tile(x_ptr + first * 8, y_ptr + first * 8, bits_ptr + first, left, BYTES, False)
    else:
        _relu_tile(x_ptr + first * 8, y_ptr + first * 8, bits_ptr + first, left, BYTES, True)


@triton.jit
def _relu_tile(x_ptr, y_ptr, bits_ptr, left, BYTES: tl.constexpr, MASKED: tl.constexpr):
    places = tl.arange(0, BYTES)
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = offsets < left if MASKED else None
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0 if MASKED else None).to(tl.float32)
    passes = x > 0.0
    passes = passes | (x != x)
    y = tl.where(passes, x, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offsets, y, mask=inside)
    packed = tl.sum(passes.to(tl.int32) << tl.arange(0, 8)[None, :], 1).to(tl.uint8)
    tl.store(bits_ptr + places, packed, mask=places * 8 < left if MASKED else None)


@triton.jit(do_not_specialize=["numel"])
def relu_backward_kernel(dy_ptr, bits_ptr, dx_ptr, numel: tl.int64, BYTES: tl.constexpr):
    """Write dx = dy where the bit is set, else 0. Arguments as relu_kernel's."""
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - first * 8, BYTES * 8).to(tl.int32)
    if left == BYTES * 8:
        _relu_backward_tile(
            dy_ptr + first * 8, bits_ptr + first, dx_ptr + first * 8, left, BYTES, False
        )
    else:
        _relu_backward_tile(
            dy_ptr + first * 8, bits_ptr + first, dx_ptr + first * 8, left, BYTES, True
        )


@triton.jit
def _relu_backward_tile(dy_ptr, bits_ptr, dx_ptr, left, BYTES: tl.constexpr, MASKED: tl.constexpr):
    places = tl.arange(0, BYTES)
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = offsets < left if MASKED else None
    packed = tl.load(bits_ptr + places, mask=places * 8 < left if MASKED else None)
    passes = ((packed[:, None].to(tl.int32) >> tl.arange(0, 8)[None, :]) & 1) != 0
    dy = tl.load(dy_ptr + offsets, mask=inside)
    tl.store(dx_ptr + offsets, tl.where(passes, dy, tl.zeros_like(dy)), mask=inside)
