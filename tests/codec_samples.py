"""Data for the statistics of the codec, and the steps and variances that it must have on them.

An element x between two codes is rounded up with probability f, the fraction of x / s, so that its
error has variance v = f (1 - f) s**2. The steps s are computed here in float64, not read back.
Outliers are exact: they count as zeros, which are so too.

At 4 bits the probability is P = round(256 f) / 256. Beside the statistics made of these variances
that is nothing: a mean of N draws is off by (P - f) s, of mean square s**2 2**-18 / 3 over f, which
adds N 2**-18 / (3 p) to z**2, p = f (1 - f). Of N = 400 draws, over f with N p >= 4, that is 0.005
on average, and z itself moves by 0.4 at most. What P is, test_codec_statistics.py tests without
chance.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from vramx.compression.config import ROUNDINGS, Format

FORMATS = [
    Format(bits, size, symmetric, rounding)
    for (bits, size), symmetric, rounding in itertools.product(
        [(8, 128), (4, 64), (8, 16), (4, 1024)], [True, False], ROUNDINGS
    )
]
NUMEL = 4096


def gaussian() -> Tensor:
    return as_bfloat16(torch.randn(NUMEL))


def student_t5() -> Tensor:
    return as_bfloat16(torch.distributions.StudentT(5.0).sample((NUMEL,)))


def outlier_channels() -> Tensor:
    x = torch.randn(NUMEL // 64, 64)
    x[:, [5, 40]] *= 50
    return as_bfloat16(x.view(-1))


def as_bfloat16(x: Tensor) -> Tensor:
    """Return numbers that are exact as outliers: of others the rounding to bfloat16 is no noise."""
    return x.bfloat16().float()


def images() -> Tensor:
    """Return soft blobs in 8 x 8 pixels: not negative, and many pixels exactly zero."""
    place = torch.rand(NUMEL // 64, 2, 1, 1) * 7
    grid = torch.arange(8.0)
    square = (grid[:, None] - place[:, 0]) ** 2 + (grid[None, :] - place[:, 1]) ** 2
    return (16 - 2 * square).clamp_min(0).round().reshape(-1)


class Step(NamedTuple):
    """Of each element: its step, and the fraction of one that it lies above a code."""

    size: Tensor
    fraction: Tensor

    @property
    def variance(self) -> Tensor:
        return self.fraction * (1 - self.fraction) * self.size**2


def step_of(x: Tensor, format: Format) -> Step:
    """Return the steps that the codec must use, from the group's extremes in float64."""
    groups = x.double().view(-1, format.group_size)
    has_outliers = format.bits == 8 and format.symmetric
    groups = without_outliers(groups) if has_outliers else groups
    low = torch.zeros(len(groups), 1).double()
    peak = groups.abs().amax(1, keepdim=True)
    levels = 2 ** (format.bits - 1) - (2 if has_outliers else 1)
    if not format.symmetric:
        low = bfloat16_towards(groups.amin(1, keepdim=True), -math.inf)
        peak, levels = groups.amax(1, keepdim=True) - low, 2**format.bits - 1
    size = bfloat16_towards(peak * ((1 + 2.0**-20) / levels), math.inf).clamp_min(2.0**-126)
    place = (groups - low) / size
    return Step(size.expand_as(groups).reshape(-1), (place - place.floor()).reshape(-1))


def without_outliers(groups: Tensor) -> Tensor:
    """Return groups with 0 for their two different numbers of the largest magnitudes."""
    for _ in range(2):
        top = groups.gather(1, groups.abs().argmax(1, keepdim=True))
        groups = torch.where(groups == top, 0.0, groups)
    return groups


def bfloat16_towards(value: Tensor, limit: float) -> Tensor:
    """Return the bfloat16 at or next to each number in the direction of `limit`."""
    near = value.to(torch.bfloat16)
    other = torch.nextafter(near, torch.full_like(near, limit))
    done = near.double() >= value if limit > 0 else near.double() <= value
    return torch.where(done, near, other).double()
