"""The codec and its noise in a compiled graph: codes of the reference, and no bias."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo
from test_compile import fresh_compiler

from vramx.compression import graph
from vramx.compression.codec import reference
from vramx.compression.config import Compression, Format
from vramx.compression.graph import hash_bytes
from vramx.kernels.layout import Layout

__all__ = ["fresh_compiler"]  # a fixture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_those_of_the_reference(bits: int, dtype: torch.dtype) -> None:
    form = Compression(level=f"int{bits}", rounding="nearest").format()
    rows = torch.randn(16, form.group_size).to(dtype)
    rows[0, 3], rows[1, 5] = float("inf"), float("nan")
    layout = Layout(rows.numel(), bits, form.group_size, form.symmetric)
    expected = reference.dequantize(reference.quantize(rows.view(-1), layout), layout, dtype)
    decoded = graph.decode(*graph.encode(rows, form, None), form, dtype)
    torch.testing.assert_close(decoded.view(-1), expected, rtol=0, atol=0, equal_nan=True)


def keys(count: int) -> torch.Tensor:
    return torch.stack([graph.noise_key(0, torch.device("cpu")) for _ in range(count)])


def mean_errors(noise: Any) -> tuple[float, float, int]:
    """Return the means of z² and z of the elements' mean errors over keys, and their number.

    The error of one element has the variance f (1 - f) s², f its fraction of a step s.
    """
    form, draws = Format(), 400
    x = torch.randn(64, 128)
    others = reference.split_outliers(x)[0] == 0  # outliers are rounded to bfloat16, always alike
    step = graph.encode(x, form, None)[1].to(torch.int32).__lshift__(16).view(torch.float32)
    fraction = (x / step[:, None]) % 1.0
    total = torch.zeros_like(x)
    for key in keys(draws):
        total += graph.decode(*graph.encode(x, form, noise(key)), form, torch.float32) - x
    deviation = (fraction * (1 - fraction) / draws).sqrt() * step[:, None]
    usable = others & (fraction * (1 - fraction) > 0.01)  # elsewhere the sum is far from normal
    z = ((total / draws) / deviation)[usable]
    return float((z**2).mean()), float(z.mean()), z.numel()


def test_rounding_by_hash_is_unbiased() -> None:
    square, mean, n = mean_errors(lambda key: key)
    # z² has mean 1 and, for a normal z, variance 2; for these sums a little more, under 3.
    assert abs(square - 1) < 4 * (3 / n) ** 0.5
    assert abs(mean) < 4 / n**0.5


def test_rounding_with_one_noise_for_ever_is_found_biased() -> None:
    frozen = keys(1)[0]
    square, _, n = mean_errors(lambda _: frozen)
    assert abs(square - 1) > 4 * (3 / n) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack([a, b]).double())[0, 1]))


def test_noise_of_two_tensors_is_independent() -> None:
    """The correlation of n independent pairs has a deviation of 1 / sqrt(n)."""
    n = 1 << 14
    noise = [hash_bytes(n, key) for key in keys(8)]
    for a, b in itertools.combinations(noise, 2):
        assert correlation(a, b) < 4.5 / n**0.5
        assert correlation(a[1:], b[:-1]) < 4.5 / n**0.5
        # Nor the same noise in another order, as an exclusive or with the key alone would give.
        assert not torch.equal(a.sort().values, b.sort().values)


def test_noise_of_one_key_is_found_dependent() -> None:
    key = keys(1)[0]
    a = hash_bytes(1 << 14, key)
    other = key.clone()
    other[0] ^= 64  # a key that differs in what rearranges only
    b = hash_bytes(1 << 14, other)
    assert correlation(a, hash_bytes(1 << 14, key)) > 0.99
    assert torch.equal(a.sort().values, b.sort().values)
