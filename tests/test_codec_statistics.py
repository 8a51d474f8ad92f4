"""Stochastic rounding is unbiased, element by element, and its variance is the one derived.

Expectations and spreads are of the distribution: variances of samples would give false alarms where
f is near 0 or 1. A bound is four or more standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import pytest
import torch
from codec_samples import (
    NUMEL,
    Step,
    bfloat16_towards,
    gaussian,
    images,
    outlier_channels,
    step_of,
    student_t5,
    without_outliers,
)
from torch import Tensor

from vramx.compression.codec import random, reference
from vramx.compression.codec.codec import layout_of, pack, unpack
from vramx.compression.config import Format

pytestmark = pytest.mark.usefixtures("seeded")

DRAWS = 400
FORMATS = [Format(8, 128), Format(6, 64), Format(4, 64, False), Format(2, 32, False)]
DATA = [student_t5, outlier_channels, images]
# Elements that are rounded both ways often enough for the moments below to mean anything.
LEAST_EVENTS = 4
LEVELS = 126  # of a code of 8 bits that is no mark

Codec = Callable[[Tensor, Format], Tensor]


def codec(x: Tensor, format: Format) -> Tensor:
    return unpack(pack(x, format))


def sums_of_errors(x: Tensor, format: Format, codec: Codec) -> tuple[Tensor, Tensor]:
    """Return the sum of each element's errors over DRAWS draws, and of their squares."""
    error, square = (torch.zeros(x.numel()).double() for _ in range(2))
    for _ in range(DRAWS):
        off = codec(x, format).double() - x.double()
        error += off
        square += off.square()
    return error, square


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_the_steps_assumed_here_are_those_of_the_headers(format: Format) -> None:
    x = gaussian()
    layout = layout_of(NUMEL, format)
    header = pack(x, format).buffer[layout.code_bytes + layout.outlier_bytes :].view(torch.bfloat16)
    scales = header[:: 1 if format.symmetric else 2].double()
    assert torch.equal(scales, step_of(x, format).size.view(-1, format.group_size)[:, 0])


class Bias(NamedTuple):
    """How far mean errors are from zero, in their own standard deviations."""

    mean_square: float
    accepted_square: float
    largest: float
    accepted_largest: float

    @property
    def found(self) -> bool:
        return (
            abs(self.mean_square - 1) > self.accepted_square or self.largest > self.accepted_largest
        )


def bias_of(x: Tensor, format: Format, codec: Codec) -> Bias:
    return bias_in(sums_of_errors(x, format, codec)[0], step_of(x, format))


def bias_in(error: Tensor, step: Step) -> Bias:
    """Test E decoded = x for every element, from the sum of its errors over DRAWS draws.

    z = mean error / sqrt(v / N). z**2 has mean 1 and variance 2 + (1 - 6 p) / (N p), p = f (1 - f):
    the fourth moment of a binomial. The largest |z| is compared with the Bonferroni bound at 1e-4
    of the normal distribution, for elements with N p >= 25, whose tails are nearly normal.
    """
    p = step.fraction * (1 - step.fraction)
    used = p * DRAWS >= LEAST_EVENTS
    z = (error / DRAWS / (step.variance / DRAWS).sqrt())[used]
    p = p[used]
    variance = 2 + (1 - 6 * p) / (DRAWS * p)
    normal = p * DRAWS >= 25
    quantile = NormalDist().inv_cdf(1 - 1e-4 / 2 / int(normal.sum()))
    return Bias(
        z.square().mean().item(),
        4 * variance.mean().sqrt().item() / math.sqrt(len(z)),
        z[normal].abs().max().item(),
        quantile,
    )


@pytest.mark.parametrize(
    ("data", "format"),
    [
        *((gaussian, each) for each in FORMATS),
        *((data, each) for data in DATA for each in (FORMATS[0], FORMATS[2])),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_the_codec_is_unbiased_and_its_variance_that_of_rounding_up_with_probability_f(
    data: Callable[[], Tensor], format: Format
) -> None:
    x = data()
    step = step_of(x, format)
    error, square = sums_of_errors(x, format, codec)
    bias = bias_in(error, step)
    assert not bias.found, bias
    excess, accepted = excess_variance(square / step.size**2, step)
    assert abs(excess) <= accepted


def with_scales(x: Tensor, format: Format, code_scale: Tensor, decode_scale: Tensor) -> Tensor:
    """Quantise what is no outlier with one scale a group, clip, and decode with another."""
    halves = reference.noise_halves(x.numel(), random.state("cpu"), random.next_stream())
    noise = ((halves + 0.5) / 2**16 - 0.5).view(-1, format.group_size)
    groups = x.view(-1, format.group_size)
    others = without_outliers(groups)
    codes = (others / code_scale + noise).round().clamp(-LEVELS, LEVELS)
    return (groups - others + codes * decode_scale).view(-1)


def exact_scale(x: Tensor, format: Format) -> Tensor:
    others = without_outliers(x.view(-1, format.group_size))
    return others.abs().amax(1, keepdim=True) * ((1 + 2.0**-20) / LEVELS)


def rounded_after(x: Tensor, format: Format) -> Tensor:
    scale = exact_scale(x, format)
    return with_scales(x, format, scale, scale.bfloat16().float())


def rounded_to_nearest_and_clipped(x: Tensor, format: Format) -> Tensor:
    scale = exact_scale(x, format).bfloat16().float()
    return with_scales(x, format, scale, scale)


def nearest(x: Tensor, format: Format) -> Tensor:
    return codec(x, Format(format.bits, format.group_size, format.symmetric, "nearest"))


def rounded_up_before(x: Tensor, format: Format) -> Tensor:
    scale = bfloat16_towards(exact_scale(x, format).double(), math.inf).float()
    return with_scales(x, format, scale, scale)


def one_biased_element(x: Tensor, format: Format) -> Tensor:
    decoded = codec(x, format)
    decoded[1000] += 0.3 * step_of(x, format).size[1000]
    return decoded


DEFECTS = [
    (rounded_after, Format(8, 128)),
    (rounded_to_nearest_and_clipped, Format(8, 128)),
    (nearest, Format(8, 128)),
    (nearest, Format(4, 64)),
    (one_biased_element, Format(8, 128)),
]


def test_the_frame_of_the_defects_is_unbiased_without_one() -> None:
    bias = bias_of(gaussian(), Format(8, 128), rounded_up_before)
    assert not bias.found, bias


@pytest.mark.parametrize(("defect", "format"), DEFECTS)
def test_a_biased_codec_is_found(defect: Codec, format: Format) -> None:
    assert bias_of(gaussian(), format, defect).found


# Of fractions of steps below 16: float32 rounds x - low, 1 / s and the product by 2**-24 of them
# each, and the sum with the noise as well.
FLOAT32 = 2.0**-18


def worst_mean(format: Format, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest |mean decoded - x| in steps, over all values that the noise can take.

    Each group has the same elements, and each draws another value. At 8 bits all but the peak and
    the outliers are small, so that float32 has digits enough for what is tested.
    """

    def every_value(numel: int, *_: object) -> Tensor:
        return torch.arange(256, dtype=torch.int32).repeat_interleave(numel // 256)

    monkeypatch.setattr(reference, "noise_bytes", every_value)
    x = torch.rand(format.group_size) * (1.0 if format.bits == 4 else 1 / 16)
    x[0] = 1
    if format.bits == 8:
        x[1], x[2] = 4, -8
    decoded = codec(x.repeat(256), format).view(256, -1).double()
    return ((decoded.mean(0) - x.double()) / step_of(x, format).size).abs().max().item()


HALF = 2.0**-9  # of a step
MEANS = [Format(8, 32), Format(4, 128), Format(4, 1024, False)]


@pytest.mark.parametrize("format", MEANS, ids=repr)
def test_the_mean_is_off_by_half_a_value_of_the_noise(format: Format, monkeypatch: Any) -> None:
    found = worst_mean(format, monkeypatch)
    assert 0.8 * HALF <= found <= HALF + FLOAT32  # 28 fractions or more: one is near the worst


@pytest.mark.parametrize(
    ("format", "off"), [(MEANS[0], 2**-8), (MEANS[1], -(2**-8)), (MEANS[2], 2**-8)], ids=repr
)
def test_noise_that_is_not_centred_is_found(
    format: Format, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MAGIC_OF_256THS", 1.5 * 2**15 + off)
    assert worst_mean(format, monkeypatch) > HALF + FLOAT32


def excess_variance(square: Tensor, step: Step) -> tuple[float, float]:
    """Return by how much squared errors exceed what is derived, and how much is accepted.

    `square` is each element's sum over DRAWS draws, in squared steps: of one draw the mean is
    p = f (1 - f) and the variance p (1 - 2 f)**2.
    """
    p = step.fraction * (1 - step.fraction)
    spread = (p * (1 - 2 * step.fraction) ** 2 / DRAWS).sum().sqrt().item()
    return (square / DRAWS - p).sum().item(), 4 * spread + 2.0**-15 * NUMEL


def test_too_much_noise_is_found() -> None:
    # Noise a tenth wider than a step leaves the mean alone and not the variance.
    x = gaussian()
    step = step_of(x, Format(8, 128))
    place = (x.double() / step.size).view(1, -1)
    noise = 1.1 * (torch.rand(DRAWS, NUMEL).double() - 0.5)
    excess, accepted = excess_variance(((place + noise).round() - place).square().sum(0), step)
    assert abs(excess) > accepted


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


def test_a_product_of_two_streams_is_unbiased_and_of_one_with_itself_is_not() -> None:
    assert product_bias(same_stream=False) <= 4
    assert product_bias(same_stream=True) > 4
