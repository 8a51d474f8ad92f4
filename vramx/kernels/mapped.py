"""Quantise numbers that are computed from what is read, and back to what they were computed from.

As quantize.py, whose tiles these are, with one function more in registers: nothing is written in
between. One pass: the traffic of packing the elements themselves, and of a norm's statistics. The
functions, by MAP:

    normal    of n = (x - mean) * rstd, by the element's statistics, sign(n) max(sqrt(|n|), |n| / 2)
                                  back: y min(|y|, 2) / rstd + mean
    scaled    of n = x * rstd, sign(n) sqrt(|n|)  back: y |y| / rstd
    root      sign(x) sqrt(|x|)         back: y |y|
    tanh      arcsin(x), in quarter turns         back: the sine
    sigmoid   arcsin(sqrt(x)), in quarter turns   back: the sine's square
    ends of tanh      the root of how often 1 - |x| is halved, and sign(x); linear up to a half
    ends of sigmoid   the same of x, with a negative sign, or of 1 - x; see turns.py
    within 6  x, at most 6, and at least 6 below the least of 0 and the group's largest; also 20
                                  back: y, which is quantize.py's to read

Element i has the statistics number (i // inner) % count. A statistic that is no positive normal
number counts as 1, in both directions; one that is NaN makes its elements NaN. A group's statistics
are found by PLACE:

    "group"   inner is a multiple of GROUP: one of each a group
    "split"   inner is at least GROUP: two of each a group, and the place where the second begins
    "each"    any inner: a division an element, which takes longer than memory does
"""

from __future__ import annotations

import triton
import triton.language as tl

from vramx.kernels.headers import narrow
from vramx.kernels.quantize4 import load_halves, pack_halves, store_halves, unpack_halves
from vramx.kernels.tiles import load_tile, pack_tile, store_tile, tile_offsets, unpack_tile
from vramx.kernels.turns import (
    arcsine,
    number_of_sigmoid,
    number_of_tanh,
    sigmoid_of_number,
    sine,
    tanh_of_number,
    with_sign_of,
)


@triton.jit(do_not_specialize=["numel", "stream"])
def quantize_map_kernel(
    x_ptr, mean_ptr, rstd_ptr, buffer_ptr, seed_ptr, numel: tl.int64, stream: tl.int64, inner,
    count,
    MAP: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write the codes and headers of MAP of a flat tensor; a program owns one tile.

    mean_ptr, rstd_ptr: fp32 [count]; None unless MAP is "normal", but rstd_ptr if it is "scaled".
    inner, count: int32, above 0.
    BITS: 8 or 4. Others as quantize_kernel's.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _quantize_tile(
            x_ptr, mean_ptr, rstd_ptr, buffer_ptr, seed_ptr, stream, numel, inner, count, first,
            left, MAP, PLACE, BITS, GROUP, ROWS, SYMMETRIC, STOCHASTIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _quantize_tile(
                x_ptr, mean_ptr, rstd_ptr, buffer_ptr, seed_ptr, stream, numel, inner, count,
                first + row * GROUP, left - row * GROUP,
                MAP, PLACE, BITS, GROUP, TAIL_ROWS, SYMMETRIC, STOCHASTIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _quantize_tile(
    x_ptr, mean_ptr, rstd_ptr, buffer_ptr, seed_ptr, stream, numel, inner, count, first, left,
    MAP: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do ROWS groups, of which `left` elements are to be done."""
    if BITS == 8:
        x = load_tile(x_ptr + first, left, ROWS, GROUP, MASKED)
        if MAP == "within 6" or MAP == "within 20":
            low, high = _limits(tl.max(x, 1), MAP)
            x = _between(x, low, high)
        else:
            x = _map(x, mean_ptr, rstd_ptr, inner, count, first, MAP, PLACE, GROUP, ROWS, 0, GROUP)
        # Repeated elements have got the statistics of others.
        if MASKED and (MAP == "normal" or MAP == "scaled"):
            x = _within(x, left, ROWS, GROUP)
        pack_tile(
            x, buffer_ptr, seed_ptr, stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = GROUP // 2
        a, b = load_halves(x_ptr + first, left, ROWS, GROUP, MASKED)
        if MAP == "within 6" or MAP == "within 20":
            low, high = _limits(tl.maximum(tl.max(a, 1), tl.max(b, 1)), MAP)
            a, b = _between(a, low, high), _between(b, low, high)
        else:
            a = _map(a, mean_ptr, rstd_ptr, inner, count, first, MAP, PLACE, GROUP, ROWS, 0, HALF)
            b = _map(
                b, mean_ptr, rstd_ptr, inner, count, first, MAP, PLACE, GROUP, ROWS, HALF, HALF
            )
        if MASKED and (MAP == "normal" or MAP == "scaled"):
            a, b = _halves_within(a, b, left, ROWS, GROUP)
        pack_halves(
            a, b, buffer_ptr, seed_ptr, stream, numel, first, left,
            ROWS, GROUP, SYMMETRIC, STOCHASTIC, MASKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel"])
def dequantize_map_kernel(
    buffer_ptr, mean_ptr, rstd_ptr, out_ptr, numel: tl.int64, inner, count,
    MAP: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Write what MAP was computed from. Arguments as quantize_map_kernel's."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (ROWS * GROUP)
    left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
    if left == ROWS * GROUP:
        _dequantize_tile(
            buffer_ptr, mean_ptr, rstd_ptr, out_ptr, numel, inner, count, first, left,
            MAP, PLACE, BITS, GROUP, ROWS, SYMMETRIC, False,
        )  # fmt: skip
    else:
        row = 0
        while row * GROUP < left:
            _dequantize_tile(
                buffer_ptr, mean_ptr, rstd_ptr, out_ptr, numel, inner, count,
                first + row * GROUP, left - row * GROUP,
                MAP, PLACE, BITS, GROUP, TAIL_ROWS, SYMMETRIC, True,
            )  # fmt: skip
            row += TAIL_ROWS


@triton.jit
def _dequantize_tile(
    buffer_ptr, mean_ptr, rstd_ptr, out_ptr, numel, inner, count, first, left,
    MAP: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SYMMETRIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do ROWS groups, of which `left` elements are to be done."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BITS == 8:
        y = unpack_tile(buffer_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
        x = _unmap(y, mean_ptr, rstd_ptr, inner, count, first, MAP, PLACE, GROUP, ROWS, 0, GROUP)
        store_tile(out_ptr + first, narrow(x, dtype), left, ROWS, GROUP, MASKED)
    else:
        HALF: tl.constexpr = GROUP // 2
        a, b = unpack_halves(buffer_ptr, numel, first, left, ROWS, GROUP, SYMMETRIC, MASKED)
        a = _unmap(a, mean_ptr, rstd_ptr, inner, count, first, MAP, PLACE, GROUP, ROWS, 0, HALF)
        b = _unmap(b, mean_ptr, rstd_ptr, inner, count, first, MAP, PLACE, GROUP, ROWS, HALF, HALF)
        store_halves(out_ptr + first, narrow(a, dtype), narrow(b, dtype), left, ROWS, GROUP, MASKED)


@triton.jit
def _map(
    x, mean_ptr, rstd_ptr, inner, count, first,
    MAP: tl.constexpr, PLACE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return MAP of fp32[ROWS, WIDTH]: of each group the elements from START on."""
    if MAP == "normal":
        mean, factor = _statistics(
            mean_ptr, rstd_ptr, inner, count, first, PLACE, GROUP, ROWS, START, WIDTH, False
        )
        normal = (x - mean) * factor
        size = tl.abs(normal)
        return with_sign_of(tl.maximum(tl.sqrt(size), 0.5 * size), normal)
    elif MAP == "scaled":  # noqa: RET505 - the compiler types what it sees: no dead return
        _, factor = _statistics(
            rstd_ptr, rstd_ptr, inner, count, first, PLACE, GROUP, ROWS, START, WIDTH, False
        )
        return with_sign_of(tl.sqrt(tl.abs(x * factor)), x)
    elif MAP == "root":
        return with_sign_of(tl.sqrt(tl.abs(x)), x)
    elif MAP == "tanh":
        return with_sign_of(arcsine(tl.abs(x)), x)
    elif MAP == "ends of tanh":
        return number_of_tanh(x)
    elif MAP == "ends of sigmoid":
        return number_of_sigmoid(x)
    else:
        return arcsine(tl.sqrt(x))


@triton.jit
def _unmap(
    y, mean_ptr, rstd_ptr, inner, count, first,
    MAP: tl.constexpr, PLACE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return what _map() made y of."""
    if MAP == "normal":
        mean, factor = _statistics(
            mean_ptr, rstd_ptr, inner, count, first, PLACE, GROUP, ROWS, START, WIDTH, True
        )
        return y * tl.minimum(tl.abs(y), 2.0) * factor + mean
    elif MAP == "scaled":  # noqa: RET505 - the compiler types what it sees: no dead return
        _, factor = _statistics(
            rstd_ptr, rstd_ptr, inner, count, first, PLACE, GROUP, ROWS, START, WIDTH, True
        )
        return y * tl.abs(y) * factor
    elif MAP == "root":
        return y * tl.abs(y)
    elif MAP == "tanh":
        return with_sign_of(sine(tl.abs(y)), y)
    elif MAP == "ends of tanh":
        return tanh_of_number(y)
    elif MAP == "ends of sigmoid":
        return sigmoid_of_number(y)
    else:
        root = sine(tl.abs(y))
        return root * root


@triton.jit
def _statistics(
    mean_ptr, rstd_ptr, inner, count, first,
    PLACE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, START: tl.constexpr,
    WIDTH: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Return the mean of elements, and what to multiply by: fp32 that broadcasts over them.

    Numbers are taken modulo count, so that those of groups behind the end are in bounds as well.
    """
    passed = first // inner  # int64, as `first` is; what follows fits into int32
    within = (first - passed * inner).to(tl.int32)
    passed = (passed % count).to(tl.int32)
    begins = within + tl.arange(0, ROWS) * GROUP
    if PLACE == "group":
        number = ((passed + begins // inner) % count)[:, None]
        return tl.load(mean_ptr + number), _factor(rstd_ptr + number, BACK)
    elif PLACE == "split":  # noqa: RET505 - the compiler types what it sees: no dead return
        number = begins // inner
        second_begins = (number + 1) * inner - begins
        one, two = (passed + number) % count, (passed + number + 1) % count
        is_first = START + tl.arange(0, WIDTH)[None, :] < second_begins[:, None]
        mean_one, mean_two = tl.load(mean_ptr + one)[:, None], tl.load(mean_ptr + two)[:, None]
        factor_one = _factor(rstd_ptr + one, BACK)[:, None]
        factor_two = _factor(rstd_ptr + two, BACK)[:, None]
        return tl.where(is_first, mean_one, mean_two), tl.where(is_first, factor_one, factor_two)
    else:
        places = begins[:, None] + (START + tl.arange(0, WIDTH))[None, :]
        number = (passed + places // inner) % count
        return tl.load(mean_ptr + number), _factor(rstd_ptr + number, BACK)


@triton.jit
def _factor(rstd_ptr, BACK: tl.constexpr):
    """Return a reciprocal deviation, or the deviation; 1 for what has no reciprocal."""
    rstd = tl.load(rstd_ptr)
    useless = (rstd < 1.1754943508222875e-38) | (rstd > 3.4028234663852886e38)
    rstd = tl.where(useless, 1.0, rstd)
    return 1.0 / rstd if BACK else rstd


@triton.jit
def _limits(largest, MAP: tl.constexpr):
    """Return fp32[ROWS, 1] twice: below and above which a group with that largest changes."""
    BOUND: tl.constexpr = 6.0 if MAP == "within 6" else 20.0
    low = tl.minimum(largest, 0.0) - BOUND
    return low[:, None], tl.where(largest == float("inf"), largest, BOUND)[:, None]


@triton.jit
def _between(x, low, high):
    """Return x where it lies between two numbers, or is NaN, else the nearer one."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _within(x, left, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return a short tile in which the last element stands for each that lies behind the end."""
    offsets = tile_offsets(ROWS, GROUP)
    last = tl.sum(tl.sum(tl.where(offsets == left - 1, x, 0.0), 1), 0)
    return tl.where(offsets < left, x, last)


@triton.jit
def _halves_within(a, b, left, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Do so for the two halves of groups."""
    HALF: tl.constexpr = GROUP // 2
    offsets = tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    last = tl.sum(tl.sum(tl.where(offsets == left - 1, a, 0.0), 1), 0)
    last += tl.sum(tl.sum(tl.where(offsets + HALF == left - 1, b, 0.0), 1), 0)
    return tl.where(offsets < left, a, last), tl.where(offsets + HALF < left, b, last)
