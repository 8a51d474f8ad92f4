"""Quantising and dequantising in plain torch: the oracle of the kernels, and the CPU path.

Works on any device and for any width from 2 to 8 bits. 8 and 4 bits and masks have the bytes that
vramx/kernels/layout.py describes; the other widths take a byte a code and are for experiments. Only
tensor operations, no branch on a tensor's contents: the functions can be traced and never wait for
a device. Pure and thread-safe. On one CPU core quantising an element takes about 2 ns and 16 bytes
of temporary memory, with noise 10 ns and 26 bytes; dequantising it 1 ns and 12 bytes.

All arithmetic is float32. `1.5 * 2**23` added to a number rounds it to an integer, half to even,
and leaves that integer in the low bits of the sum: no conversion. The scale is rounded *up* to
bfloat16 before any code is computed with it: rounded later it would bias every element.

Stochastic rounding of t = x / s, or of (x - minimum) / s, is floor((256 t rounded + b) / 256), b a
random byte; rounded is to an integer, half to even.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from vramx.kernels.layout import Layout

_MAGIC = 1.5 * 2**23
_MAGIC_OF_256THS = 1.5 * 2**15  # the same, with a lowest bit that is worth 2**-8
# Widens the step so that no code leaves its range, whatever the noise and the rounding errors.
_MARGIN = 1 + 2.0**-20
_SMALLEST_NORMAL = 2.0**-126  # a smaller scale would have no reciprocal
_NAN_BITS = 0x7FC00000
_INFINITE_KEY = -0x1000000  # 0xff000000 as an int32: the key of an infinity
_SIGN_BIT = -0x80000000
_UPPER_HALF = -0x10000  # 0xffff0000 as an int32
_FLOAT16_MAX = 65504.0
_WORD = 0xFFFFFFFF


def philox(counter: list[Tensor], key: list[Tensor], rounds: int = 7) -> list[Tensor]:
    """Return the four words of Philox4x32 for each counter: int64 tensors of 32-bit values.

    Args:
        counter: four int64 tensors of 32-bit values, which broadcast.
        key: two of them.
        rounds: 7 is what the authors found to pass every test of BigCrush; 10 their default.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Example:
        >>> zero = torch.tensor(0)
        >>> [hex(int(word)) for word in philox([zero] * 4, [zero] * 2)]
        ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 wraps, and its bits stay right; what is above a low word goes where that is used.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0).bitwise_and_(_WORD), product1
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1).bitwise_and_(_WORD), product0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1 & _WORD, c2, c3 & _WORD]


def noise_halves(numel: int, noise: Tensor, stream: int | Tensor) -> Tensor:
    """Return 16 random bits for each of `numel` elements (a multiple of 8), as int32: dropout's.

    Element i takes from the block i // 8 of its stream: word (i % 8) // 2, low half if i is even.
    """
    return _cut(_noise_words(numel // 8, noise, stream), torch.int16).bitwise_and_(0xFFFF)


def noise_bytes(numel: int, noise: Tensor, stream: int | Tensor) -> Tensor:
    """Return the 8 random bits of each of `numel` codes (a multiple of 16), as int32.

    Codes are counted as they lie in the buffer: of two in a byte P, the one in its low half is 2 P,
    the one in its high half 2 P + 1. Code i takes from the block i // 16: byte i % 4 of word
    (i % 16) // 4.
    """
    return _cut(_noise_words(numel // 16, noise, stream), torch.uint8)


def _cut(words: list[Tensor], into: torch.dtype) -> Tensor:
    """Return the parts of the words, the lowest of the first first, as int32."""
    parts = torch.stack([word.to(torch.int32) for word in words], 1).view(into)
    return parts.view(-1).to(torch.int32)


def _noise_words(blocks: int, noise: Tensor, stream: int | Tensor) -> list[Tensor]:
    """Return the four words of each of the first blocks of a stream."""
    block = torch.arange(blocks, device=noise.device)
    seed, epoch = noise.unbind()
    # Filled on the device: a copy of a Python int would wait for it.
    number = stream if isinstance(stream, Tensor) else torch.full_like(seed, stream)
    return philox(
        [block & _WORD, block >> 32, number, epoch & _WORD], [seed & _WORD, (seed >> 32) & _WORD]
    )


def quantize(
    flat: Tensor, layout: Layout, *, noise: Tensor | None = None, stream: int | Tensor = 0
) -> Tensor:
    """Return the packed buffer of a tensor.

    Args:
        flat: 1-D, floating, layout.numel elements.
        layout: 2 to 8 bits.
        noise: key and epoch, int64[2] on the device of `flat`, to round stochastically; None rounds
            to the nearest code, half to even.
        stream: number of the tensor's stream of noise, below 2**32.

    Error bound: see vramx/compression/codec/codec.py.

    Example:
        >>> layout = Layout(numel=16, bits=8, group_size=16, symmetric=True)
        >>> quantize(torch.linspace(-1, 1, 16), layout)[:3]
        tensor([128, 130, 150], dtype=torch.uint8)
    """
    x = _groups(flat.detach().to(torch.float32), layout)
    marks = torch.empty(0)
    if layout.has_outliers:
        marks, outliers, scale_bits = split_outliers(x)
        header = torch.cat([outliers.view(torch.int16), (scale_bits >> 16).to(torch.int16)])
    elif layout.symmetric:
        scale_bits = _scale_bits(x.abs().amax(1), (1 << (layout.bits - 1)) - 1)
        header = (scale_bits >> 16).to(torch.int16)
    else:
        low_bits = _round_down(x.amin(1))
        low = low_bits.view(torch.float32)
        scale_bits = _scale_bits(x.amax(1) - low, (1 << layout.bits) - 1)
        header = ((scale_bits >> 16) & 0xFFFF) | low_bits
        x = x - low[:, None]
    t = x * (1.0 / scale_bits.view(torch.float32))[:, None]
    if noise is None:
        values = (t + _MAGIC).view(torch.int32)
    else:
        added = noise_bytes(t.numel(), noise, stream)
        if layout.bits == 4:
            added = added.view(-1, layout.group_size // 2, 2).transpose(1, 2)
        fixed = (t + _MAGIC_OF_256THS).view(torch.int32)
        values = (fixed + added.reshape_as(fixed)) >> 8
    if layout.has_outliers:
        values = torch.where(marks != 0, marks, values)
    codes = _pack_codes(values, layout)
    return torch.cat([_pad_to(codes, layout.code_bytes), header.view(torch.uint8)])


def split_outliers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the marks, the words of outliers, and the scales of the others, of float32 groups.

    The outliers of a group are its two different numbers of the largest magnitudes, of +a and -a
    the negative one first. A mark is -128 where the first is, 127 where the second is, else 0; a
    word is an int32 of both as bfloat16, the first in its low half; a scale is the bits of a
    float32. Elements that are not finite are one number, which is NaN.

    Example:
        >>> split_outliers(torch.tensor([[1.0, -1000.0, 0.5, 2000.0]]))[0]
        tensor([[   0,  127,    0, -128]], dtype=torch.int32)
    """
    bits = x.view(torch.int32)
    key = (bits << 1) | ((bits >> 31) & 1)  # unsigned, it compares as the magnitude does
    top = _next_below(key, torch.zeros_like(key[:, 0]))
    first = torch.where(_is_finite(top), top, _INFINITE_KEY)  # the least of what is not finite
    second = _next_below(key, first)
    peak = ((_next_below(key, second) >> 1) & 0x7FFFFFFF).view(torch.float32)
    marks = torch.where((key ^ _SIGN_BIT) >= (first ^ _SIGN_BIT)[:, None], -128, 0)
    marks = torch.where(key == second[:, None], 127, marks).to(torch.int32)
    one = torch.where(_is_finite(first), (_bfloat16_bits(first) >> 16) & 0xFFFF, _NAN_BITS >> 16)
    two = torch.where(_is_finite(second), _bfloat16_bits(second) & _UPPER_HALF, _NAN_BITS)
    return marks, (one | two).to(torch.int32), _scale_bits(peak, 126).to(torch.int32)


def decode_with_outliers(codes: Tensor, scale: Tensor, words: Tensor) -> Tensor:
    """Return float32 of codes that are float32, a row a group; the words of outliers are int32.

    Example:
        >>> words = split_outliers(torch.tensor([[1.0, -1000.0, 0.5, 2000.0]]))[1]
        >>> codes = torch.tensor([[4.0, 127.0, 2.0, -128.0]])
        >>> decode_with_outliers(codes, torch.tensor(0.25), words)
        tensor([[ 1.0000e+00, -1.0000e+03,  5.0000e-01,  2.0000e+03]])
    """
    x = torch.where(codes == 127, _float_of_upper_half(words & _UPPER_HALF), codes * scale)
    return torch.where(codes == -128, _float_of_upper_half(words << 16), x)


def dequantize(buffer: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the elements of a packed buffer, 1-D and in fresh memory.

    What was no finite number is NaN; so is all of its group in formats without outliers. float16 is
    kept within its range.

    Example:
        >>> layout = Layout(numel=4, bits=8, group_size=16, symmetric=True)
        >>> buffer = quantize(torch.tensor([1000.0, 127.0, -64.0, 31.0]), layout)
        >>> dequantize(buffer, layout, torch.float32)
        tensor([1000.0000,  127.0000,  -63.9648,   31.2148])
    """
    packed, outliers, header = buffer.split(
        [layout.code_bytes, layout.outlier_bytes, layout.header_bytes]
    )
    codes = _unpack_codes(packed, layout)
    if layout.symmetric:
        scale = _float_of_upper_half(header.view(torch.int16).to(torch.int32) << 16)
        x = codes * scale
        if layout.has_outliers:
            x = decode_with_outliers(codes, scale, outliers.view(torch.int32))
    else:
        words = header.view(torch.int32)
        x = codes * _float_of_upper_half(words << 16) + _float_of_upper_half(words & _UPPER_HALF)
    if dtype == torch.float16:
        x = x.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    x = x.view(-1)[: layout.numel]
    # A copy where the slice would keep the memory of the padding or be of the wrong type.
    return x.to(dtype, copy=x.numel() != codes.numel())


def pack_mask(flat: Tensor) -> Tensor:
    """Return the bits of a 1-D bool tensor: bit k of byte j is element 8 j + k.

    Example:
        >>> pack_mask(torch.tensor([True, False, True]))[:2]
        tensor([5, 0], dtype=torch.uint8)
    """
    code_bytes = Layout(flat.numel(), 1, 128, symmetric=True).code_bytes
    bits = _pad_to(flat.detach().view(torch.uint8), 8 * code_bytes).view(-1, 8)
    byte = bits[:, 0].clone()
    for k in range(1, 8):
        byte |= bits[:, k] << k
    return byte


def unpack_mask(buffer: Tensor, numel: int) -> Tensor:
    """Return the first `numel` bits of a packed mask as bools.

    Example:
        >>> unpack_mask(torch.tensor([5], dtype=torch.uint8), 3)
        tensor([ True, False,  True])
    """
    places = torch.arange(8, dtype=torch.uint8, device=buffer.device)
    bits = ((buffer[:, None] >> places) & 1).view(-1)[:numel]
    return bits.to(torch.bool)


def _groups(flat: Tensor, layout: Layout) -> Tensor:
    """Return the elements as one row a group; the last row is filled with the last element.

    That is the one filling that changes neither minimum nor maximum; its codes are cleared later.
    """
    missing = layout.groups * layout.group_size - layout.numel
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, layout.group_size)


def _next_below(key: Tensor, top: Tensor) -> Tensor:
    """Return the greatest unsigned key below `top`, of 0 the greatest; or one above if none is.

    A difference below zero wraps to the top, as in vramx/kernels/headers.py.
    """
    wrapped = (key - top[:, None]) ^ _SIGN_BIT
    return (wrapped.amax(1) ^ _SIGN_BIT) + top


def _is_finite(key: Tensor) -> Tensor:
    return ((key >> 1) & 0x7FFFFFFF) < 0x7F800000


def _bfloat16_bits(key: Tensor) -> Tensor:
    """Return the bits of a key's number, rounded to bfloat16: in the upper half."""
    bits = ((key >> 1) & 0x7FFFFFFF) | (key << 31)
    return bits + (0x7FFF + ((bits >> 16) & 1))


def _scale_bits(peak: Tensor, levels: int) -> Tensor:
    """Return the bits of the step of each group: a float32 that is a bfloat16, or NaN."""
    scale = (peak * (_MARGIN / levels)).clamp_min(_SMALLEST_NORMAL)
    rounded = (scale.view(torch.int32) + 0xFFFF) & _UPPER_HALF
    finite = (scale < math.inf) & (rounded.view(torch.float32) < math.inf)
    return torch.where(finite, rounded, _NAN_BITS)


def _round_down(low: Tensor) -> Tensor:
    """Return the bits of the largest bfloat16 not above each number; -inf below the smallest."""
    bits = low.view(torch.int32)
    # +0 and -0 are one minimum: which of them a group holds must not show in its header.
    bits = torch.where(bits == -(1 << 31), 0, bits)
    return torch.where(bits < 0, bits + 0xFFFF, bits) & _UPPER_HALF


def _float_of_upper_half(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)[:, None]


def _pack_codes(values: Tensor, layout: Layout) -> Tensor:
    """Return the codes in the low bits of `values`, one row a group, as bytes; padding is 0."""
    if layout.bits < 8 and not (layout.bits != 4 and layout.symmetric):
        values = values & ((1 << layout.bits) - 1)
    values = values & 0xFF
    missing = layout.groups * layout.group_size - layout.numel
    if missing:
        values = _pad_to(values.reshape(-1)[: layout.numel], values.numel()).view_as(values)
    codes = values.to(torch.uint8)
    if layout.bits == 4:
        half = layout.group_size // 2
        codes = codes[:, :half] | (codes[:, half:] << 4)
    return codes.reshape(-1)


def _unpack_codes(packed: Tensor, layout: Layout) -> Tensor:
    """Return the codes as float32, one row a group."""
    if layout.bits != 4:
        codes = packed[: layout.groups * layout.group_size]
        codes = codes.view(torch.int8) if layout.symmetric else codes
        return codes.to(torch.float32).view(-1, layout.group_size)
    rows = packed[: layout.groups * layout.group_size // 2].view(-1, layout.group_size // 2)
    codes = torch.cat([rows & 15, rows >> 4], 1).to(torch.float32)
    return torch.where(codes > 7, codes - 16, codes) if layout.symmetric else codes


def _pad_to(flat: Tensor, numel: int) -> Tensor:
    return pad(flat, (0, numel - flat.numel())) if numel != flat.numel() else flat
