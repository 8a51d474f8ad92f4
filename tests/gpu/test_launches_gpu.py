"""Launches that are looked up by sizes and types give what launches that are made anew give.

test_kernels_launches.py says with stand-ins which launches are told from each other; here are the
compiled kernels, in turns, on a side stream too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from vramx.compression.config import Compression
from vramx.kernels import (
    channel_norm_launch,
    channel_norm_tables_launch,
    launch,
    norm_backward_launch,
    norm_launch,
    rotary_launch,
)
from vramx.kernels import start as module
from vramx.nn.functional import batch_norm, glu_linear, layer_norm, rms_norm, rotary

pytestmark = pytest.mark.gpu

NEAREST = Compression(rounding="nearest")
BF16, FP32 = torch.bfloat16, torch.float32
CACHES = (
    launch.ready_for, norm_launch._forward_launch, norm_launch._output_launch,
    norm_backward_launch._of_rows, norm_backward_launch._of_sums, rotary_launch._of_shape,
    channel_norm_launch._sums_of_shape, channel_norm_launch._forward_launch,
    channel_norm_launch._launch, channel_norm_launch._sums_launch,
    channel_norm_tables_launch._statistics_plan, channel_norm_tables_launch._factors_plan,
)  # fmt: skip
Results = list[Tensor]


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def with_gradients(result: Tensor, inputs: list[Tensor]) -> Results:
    incoming = sample(*result.shape, seed=9, dtype=result.dtype).detach()
    return [result.detach(), *torch.autograd.grad(result, inputs, incoming)]


def norm(rows: int, dtype: torch.dtype = BF16, weight: torch.dtype = BF16) -> Results:
    x, w = sample(rows, 512, dtype=dtype), sample(512, seed=1, dtype=weight)
    return with_gradients(rms_norm(x, w, 1e-6, keep=NEAREST).y, [x, w])


def norm_of_sum(dtype: torch.dtype = BF16) -> Results:
    x, residual = (sample(33, 512, seed=seed, dtype=dtype) for seed in (2, 3))
    w, b = (sample(512, seed=seed, dtype=dtype) for seed in (4, 5))
    y = layer_norm(x, w, b, residual=residual, keep=NEAREST).y
    return with_gradients(y, [x, residual, w, b])


def heads(tokens_first: bool, per_head: bool = False, dtype: torch.dtype = BF16) -> Results:
    x = sample(2, 33, 4, 64, dtype=dtype)
    q = x.transpose(1, 2) if tokens_first else x.transpose(1, 2).contiguous()
    angles = sample(2, 4 if per_head else 1, 33, 64, seed=6, dtype=dtype).detach()
    return with_gradients(rotary(q, q, angles.cos(), angles.sin())[0], [x])


def unit(dtype: torch.dtype = BF16) -> Results:
    gate, up, w = (sample(64, 256, seed=seed, dtype=dtype) for seed in (7, 8, 9))
    return with_gradients(glu_linear(gate, up, w, keep=NEAREST), [gate, up, w])


def images(
    side: int, activation: str = "relu", dtype: torch.dtype = BF16, *, adds: bool = False
) -> Results:
    x, residual = (sample(4, 128, side, side, seed=seed, dtype=dtype) for seed in (10, 11))
    w, b = (sample(128, seed=seed, dtype=FP32) for seed in (12, 13))
    given = residual if adds else None
    mean, var = torch.zeros(128, device="cuda"), torch.ones(128, device="cuda")
    y = batch_norm(
        x, mean, var, w, b, training=True, activation=activation, residual=given, keep=NEAREST
    ).y
    return [*with_gradients(y, [x, w, b, *([residual] if adds else [])]), mean, var]


CALLS: list[Callable[[], Results]] = [
    partial(norm, 33), partial(norm, 65), partial(norm, 33, FP32, FP32),
    partial(norm, 33, BF16, FP32), norm_of_sum, partial(norm_of_sum, FP32),
    partial(heads, True), partial(heads, False), partial(heads, True, True),
    partial(heads, True, False, FP32), unit, partial(unit, FP32), partial(images, 8),
    partial(images, 9), partial(images, 8, "silu"), partial(images, 8, "relu", FP32),
    partial(images, 8, adds=True),
]  # fmt: skip


def anew(call: Callable[[], Results]) -> Results:
    """Make a call whose launches are Triton's own."""
    for cache in CACHES:
        cache.cache_clear()
    module._compiled.clear()
    return call()


def test_launches_in_turns_are_as_launches_made_anew() -> None:
    expected = [anew(call) for call in CALLS]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    rounds = [[call() for call in CALLS] for _ in range(2)]
    with torch.cuda.stream(side):
        rounds.append([call() for call in CALLS])
    side.synchronize()
    for found in rounds:
        for ours, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))
