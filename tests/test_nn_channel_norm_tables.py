"""What is of a channel in batch norm, in Triton's interpreter: statistics and factors as torch's.

Numbers are of order 1 and in float32, whose unit is 2**-24: a few operations leave 1e-6, and sums
of N terms of order 1 that are added in another order N 2**-24.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from interpreted_nn import interpreted_nn
from torch import Tensor

from vramx.nn import reference_channel_norm as reference
from vramx.nn.running_statistics import Running

CLOSE = 1e-6
# What is moved to is rounded, and so is the result: by the interpreter towards zero, by 2**-7.
ROUNDING = {torch.float32: CLOSE, torch.bfloat16: 2 * 2.0**-7}


def in_place(path: str, *arguments: Any, defect: str = "") -> tuple[Tensor, ...]:
    return interpreted_nn().in_place(path, *arguments, defect=defect)


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor, tolerance: float = CLOSE) -> bool:
    return torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def moved(momentum: float, dtype: torch.dtype, defect: str = "") -> list[tuple[Tensor, Tensor]]:
    """Return running statistics as a batch leaves them, ours and torch's."""
    x = sample(0, 3, 200, 2, 2)  # more channels than a program has, and not a multiple
    ours = Running(sample(1, 200).to(dtype), sample(2, 200).square().to(dtype), momentum)
    ours = ours._replace(tracked=torch.tensor(41))
    mean, var = (each.clone().float() for each in ours[:2])
    arguments = x.contiguous(memory_format=torch.channels_last), ours, 1e-5
    found = in_place("nn.running_statistics.found_ahead", *arguments, defect=defect)
    functional.batch_norm(x, mean, var, training=True, momentum=momentum)
    return list(zip(found[1:], (mean, var, torch.tensor(42)), strict=True))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("momentum", [0.1, 0.9])
def test_running_statistics_move_as_torchs(momentum: float, dtype: Any) -> None:
    for ours, theirs in moved(momentum, dtype):
        assert near(ours, theirs, ROUNDING[dtype])


def test_comparison_of_running_statistics_sees_a_defect() -> None:
    pairs = moved(0.1, torch.float32, "momentum of the old statistics")
    assert not all(near(*pair) for pair in pairs)


def test_what_is_not_kept_is_not_needed() -> None:
    mean, var, rstd = sample(1, 20), sample(2, 20).square(), torch.full((20,), torch.nan)
    arguments = (mean, var), rstd, (None, None, None), (1e-3, 0.0, 9)
    *_, found = in_place("kernels.channel_norm_tables_launch.statistics", *arguments)
    assert near(found, (var + 1e-3).rsqrt())


@pytest.mark.parametrize(("rows", "channels"), [(1, 16), (33, 48), (700, 64)])
def test_factors_are_plain_torchs(rows: int, channels: int) -> None:
    shares, rstd, weight = sample(0, 2, rows, channels), sample(1, channels), sample(2, channels)
    factors, dweight, dbias = (torch.full((*n, channels), torch.nan) for n in ((3,), (), ()))
    sizes = torch.Size((5, channels, 7))
    outputs = factors, dweight, dbias
    path = "kernels.channel_norm_tables_launch.factors"
    *_, factors, dweight, dbias = in_place(path, shares, (rstd, weight), outputs, 35)
    totals = shares.sum(1)
    expected = reference.factors(totals, rstd, weight, reference.Shape(0, sizes))
    tolerance = max(CLOSE, rows * 2.0**-24)
    assert near(factors, torch.stack(expected), tolerance)
    assert near(torch.stack((dbias, dweight)), totals, tolerance)


def test_factors_without_a_weight_and_unwanted_gradients() -> None:
    shares, rstd, factors = sample(0, 2, 3, 16), sample(1, 16), torch.full((3, 16), torch.nan)
    arguments = shares, (rstd, None), (factors, None, None), 35
    *_, found = in_place("kernels.channel_norm_tables_launch.factors", *arguments)
    shape = reference.Shape(0, torch.Size((5, 16, 7)))
    assert near(found, torch.stack(reference.factors(shares.sum(1), rstd, None, shape)))
