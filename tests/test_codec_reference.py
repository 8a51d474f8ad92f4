"""The reference against an implementation of the description alone, by element, in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_samples import FORMATS
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from vramx.compression.codec import reference
from vramx.compression.codec.codec import layout_of
from vramx.compression.config import ROUNDINGS, Format

# Philox4x32: rounds, counter, key, output. Source: Random123 1.14, tests/kat_vectors.
KNOWN_ANSWERS = [
    (7, "00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (10, "00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
]  # fmt: skip


def philox_of_integers(counter: list[int], key: list[int], rounds: int) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(rounds):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def words_of(block: int, state: Tensor, stream: int) -> list[int]:
    seed, epoch = (int(value) % 2**64 for value in state)
    counter = [block % 2**32, block >> 32, stream, epoch % 2**32]
    return philox_of_integers(counter, [seed % 2**32, seed >> 32], 7)


def noise_of(element: int, format: Format, state: Tensor, stream: int) -> int:
    """Return the noise of a code, which has the number of its place in the buffer."""
    number, size = element, format.group_size
    if format.bits == 4:
        group, inside = divmod(element, size)
        high, j = divmod(inside, size // 2)
        number = group * size + 2 * j + high
    word = words_of(number // 16, state, stream)[number % 16 // 4]
    return word >> 8 * (number % 4) & 255


def code_of(t: np.float32, element: int, format: Format, state: Tensor, stream: int) -> int:
    if format.rounding == "nearest":
        return round(float(t))  # Python rounds half to even too
    return (round(256 * float(t)) + noise_of(element, format, state, stream)) // 256


def bits_of(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def step_bits(peak: np.float32, levels: int) -> int:
    scale = np.float32(peak * np.float32((1 + 2.0**-20) / levels))
    return (bits_of(max(scale, np.float32(2.0**-126))) + 0xFFFF) & 0xFFFF0000


def largest_numbers(group: np.ndarray) -> list[np.float32]:
    """Return the three different numbers of the largest magnitudes, the negative of two first.

    Where there are fewer, the third is the first, and of one the second is that.
    """
    found = sorted(set(map(float, group)), key=lambda value: (-abs(value), value))
    values = [found[0], found[min(1, len(found) - 1)], abs(found[2 if len(found) > 2 else 0])]
    return [np.float32(value) for value in values]


def bfloat16_bytes(value: np.float32) -> bytes:
    bits = torch.tensor(float(value)).bfloat16().view(torch.int16)
    return (int(bits) & 0xFFFF).to_bytes(2, "little")


def bytes_of(x: np.ndarray, format: Format, state: Tensor, stream: int) -> bytes:
    """Return the packed buffer of finite float32 numbers."""
    size, bits = format.group_size, format.bits
    codes, outliers, headers = [], b"", b""
    for start in range(0, len(x), size):
        group = x[start : start + size]
        low, marks = np.float32(0), {}
        if format.symmetric and bits == 8:
            first, second, peak = largest_numbers(group)
            marks = {bits_of(first): 128, bits_of(second): 127}
            outliers += b"".join(bfloat16_bytes(value) for value in (first, second))
            scale = step_bits(peak, 126)
            headers += (scale >> 16).to_bytes(2, "little")
        elif format.symmetric:
            scale = step_bits(np.abs(group).max(), 2 ** (bits - 1) - 1)
            headers += (scale >> 16).to_bytes(2, "little")
        else:
            raw = bits_of(group.min())
            low_bits = (raw + (0xFFFF if raw >> 31 else 0)) & 0xFFFF0000
            low = float_of(low_bits)
            scale = step_bits(group.max() - low, 2**bits - 1)
            headers += ((scale >> 16) | low_bits).to_bytes(4, "little")
        inverse = np.float32(1) / float_of(scale)
        for i, value in enumerate(group):
            t = np.float32(np.float32(value - low) * inverse)
            code = code_of(t, start + i, format, state, stream) % 2**bits
            codes.append(marks.get(bits_of(value), code))
        codes += [0] * (size - len(group))
    if bits == 4:
        half = size // 2
        codes = [
            codes[g + j] | codes[g + j + half] << 4
            for g in range(0, len(codes), size)
            for j in range(half)
        ]
    return bytes(codes) + bytes(-len(codes) % 16) + outliers + headers


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_the_bytes_are_those_of_the_description(format: Format) -> None:
    x = torch.randn(3 * format.group_size - 5) * torch.logspace(-30, 30, 3 * format.group_size - 5)
    state = torch.tensor([-0x123456789ABCDEF, 5])
    flat = layout_of(x.numel(), format)
    noise = state if format.rounding == "stochastic" else None
    buffer = reference.quantize(x, flat, noise=noise, stream=7)
    assert bytes(buffer.tolist()) == bytes_of(x.numpy(), format, state, 7)
    assert buffer.numel() == flat.buffer_bytes


def test_a_scale_rounded_to_nearest_gives_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, nearest = torch.randn(4096), Format(rounding="nearest")
    state = torch.tensor([0, 0])
    right = bytes_of(x.numpy(), nearest, state, 0)
    scale_bits = reference._scale_bits
    monkeypatch.setattr(
        reference,
        "_scale_bits",
        lambda peak, levels: (scale_bits(peak, levels) - 0x8000) & -0x10000,
    )
    assert bytes(reference.quantize(x, layout_of(4096, nearest)).tolist()) != right


@pytest.mark.parametrize(("rounds", "counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_numbers(
    rounds: int, counter: str, key: str, output: str
) -> None:
    def words(text: str) -> list[Tensor]:
        return [torch.tensor(int(word, 16)) for word in text.split()]

    assert reference.philox(words(counter), words(key), rounds) == words(output)


def test_the_noise_of_a_large_tensor_counts_blocks_in_64_bits() -> None:
    # Block 2**32 is element 2**35: reached by the counter alone, no tensor is that large here.
    words = [torch.tensor([value]) for value in (0, 1, 3, 2)]
    found = reference.philox(words, [torch.tensor(9), torch.tensor(8)])
    assert [int(word) for word in found] == philox_of_integers([0, 1, 3, 2], [9, 8], 7)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [4096, 4000])
def test_a_trace_of_the_reference_is_the_reference(numel: int, bits: int, rounding: str) -> None:
    # Tracing on fake tensors stops at anything that would look at a value, and so at a wait.
    layout = layout_of(numel, Format(bits, 64, bits == 8))

    def both(flat: Tensor, noise: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        drawn = noise if rounding == "stochastic" else None
        buffer = reference.quantize(flat, layout, noise=drawn, stream=stream)
        return buffer, reference.dequantize(buffer, layout, flat.dtype)

    x = torch.randn(numel, dtype=torch.bfloat16)
    noise, stream = torch.tensor([3, 1]), torch.tensor(5)
    traced = make_fx(both, tracing_mode="fake")(x, noise, stream)
    x, noise, stream = torch.randn_like(x), torch.tensor([4, 2]), torch.tensor(6)
    assert all(map(torch.equal, traced(x, noise, stream), both(x, noise, stream)))


def test_masks_can_be_traced() -> None:
    mask = torch.rand(1000) > 0.5
    both = lambda flat: reference.unpack_mask(reference.pack_mask(flat), 1000)  # noqa: E731
    assert torch.equal(make_fx(both, tracing_mode="fake")(mask)(~mask), ~mask)
