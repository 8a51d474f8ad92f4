"""What the codec's noise does to a gradient and to a product: no bias, and a spread that is known.

The expectations and spreads are derived, the seeds fixed, the bounds four standard deviations; each
test fails when the defect that it is for is planted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from codec_samples import gaussian, images, step_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vramx.compression import random, reference
from vramx.compression.codec import pack, unpack
from vramx.compression.config import Format


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    random.manual_seed(0, rank=0)
    yield
    random.manual_seed(0, rank=0)


class Layer(NamedTuple):
    x: Tensor
    weight: Tensor
    upstream: Tensor


def layer() -> Layer:
    return Layer(images().view(64, 64), torch.randn(8, 64) / 8, torch.randn(64, 8))


def gradients(layer: Layer, format: Format) -> tuple[Tensor, Tensor]:
    """Return dW and dx of a Linear that keeps its input packed."""
    x = layer.x.clone().requires_grad_()
    weight = layer.weight.clone().requires_grad_()

    def keep(saved: Tensor) -> object:
        is_input = saved.data_ptr() == x.data_ptr()
        return pack(saved.detach().reshape(-1), format) if is_input else saved

    def fetch(kept: object) -> Tensor:
        return kept if isinstance(kept, Tensor) else unpack(kept).view_as(x)  # type: ignore[arg-type]

    with saved_tensors_hooks(keep, fetch):
        out = torch.nn.functional.linear(x, weight)
    out.backward(layer.upstream)
    assert weight.grad is not None
    assert x.grad is not None
    return weight.grad, x.grad


def weight_bias(layer: Layer, format: Format, draws: int = 200) -> tuple[float, float]:
    """Return the mean z**2 of dW - E dW over its elements, and what it may differ from 1 by.

    dW = g^T x is linear in x, so its error has covariance sum_t g_ti g_tk v_tj / N between the rows
    i and k of column j, and none between columns. The variance of a mean of z**2 is twice the sum
    of the squared correlations. The elements of x are many, so z is nearly normal.
    """
    exact = layer.upstream.double().T @ layer.x.double()
    mean = sum(gradients(layer, format)[0].double() for _ in range(draws)) / draws
    g, v = layer.upstream.double(), step_of(layer.x.reshape(-1), format).variance.view_as(layer.x)
    covariance = torch.einsum("ti,tk,tj->jik", g, g, v) / draws
    variance = covariance.diagonal(dim1=1, dim2=2)
    used = variance.sum(1) > 1e-6 * variance.sum(1).mean()
    variance, covariance = variance[used], covariance[used]
    correlation = covariance / (variance[:, :, None] * variance[:, None, :]).sqrt()
    z = (mean - exact).T[used] / variance.sqrt()
    return z.square().mean().item(), 4 * (2 * correlation.square().sum()).sqrt().item() / z.numel()


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_the_gradient_of_a_weight_is_unbiased(bits: int) -> None:
    found, accepted = weight_bias(layer(), Format(bits, 64, False))
    assert abs(found - 1) <= accepted


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_the_gradient_of_a_weight_is_biased_by_rounding_to_nearest(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = reference.quantize
    monkeypatch.setattr(
        reference, "quantize", lambda flat, layout, **_: quantize(flat, layout, noise=None)
    )
    found, accepted = weight_bias(layer(), Format(bits, 64, False), draws=100)
    assert abs(found - 1) > accepted


def test_the_gradient_of_the_input_is_exact() -> None:
    given = layer()
    exact = given.upstream @ given.weight
    assert torch.equal(gradients(given, Format(2, 32, False))[1], exact)


def test_the_noise_of_a_gradient_doubles_with_each_bit_removed() -> None:
    # The step is range / (2**bits - 1): a slope of log2(15 / 255) / 4 = -1.022 a bit. The rest of
    # the 0.05 is for the noise of the estimate and for scales that round up by other amounts.
    given = Layer(torch.randn(64, 64), torch.randn(8, 64), torch.randn(64, 8))
    exact = given.upstream.double().T @ given.x.double()
    bits = torch.arange(4, 9).double()
    logs = []
    for width in bits.int().tolist():
        errors = [gradients(given, Format(width, 64, False))[0].double() - exact for _ in range(40)]
        logs.append(torch.stack(errors).square().mean().sqrt().log2())
    centred = bits - bits.mean()
    slope = (centred * torch.stack(logs)).sum() / centred.square().sum()
    assert abs(slope + 1) <= 0.05


# ---- products of two packed tensors ----


def product_bias(same_stream: bool, draws: int = 100) -> float:
    """Return the mean error of a product of two packed tensors, in its standard deviations.

    With independent errors a and b of x and y the product's error x b + y a + a b has mean zero and
    variance x**2 v_y + y**2 v_x + v_x v_y.
    """
    how = Format(4, 64, False)
    x, y = gaussian(), gaussian()
    streams = random.Streams()
    total = 0.0
    for step in range(draws):
        streams.restart(step)
        first = unpack(pack(x, how, streams)).double()
        if same_stream:
            streams.restart(step)
        second = unpack(pack(y, how, streams)).double()
        total += (first * second - x.double() * y.double()).sum().item()
    vx, vy = step_of(x, how).variance, step_of(y, how).variance
    variance = (x.double() ** 2 * vy + y.double() ** 2 * vx + vx * vy).sum() * draws
    return abs(total) / variance.sqrt().item()


def test_a_product_of_two_streams_is_unbiased() -> None:
    assert product_bias(same_stream=False) <= 4


def test_a_product_of_one_stream_with_itself_is_biased() -> None:
    assert product_bias(same_stream=True) > 4
