"""Launches of the norms by channel, and those that differ in what Triton compiles for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vramx.kernels import channel_norm_launch, channel_norm_tables_launch
from vramx.kernels.elementwise_launch import Noise
from vramx.kernels.layout import Layout

BF16, FP32 = torch.bfloat16, torch.float32
NOISE = torch.zeros(2, dtype=torch.int64)
LAYOUT = Layout(1024, 8, 128, True)


def rows(dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(8, 128, dtype=dtype)


def vector(dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else torch.zeros(128, dtype=dtype)


PACKED = torch.zeros(2048, dtype=torch.uint8)
BITS = torch.zeros(256, dtype=torch.uint8)
CHANNELS = channel_norm_launch.Channels(1, 128)
LONG = channel_norm_launch.Channels(4096, 128)
RELU = channel_norm_launch.Activation("leaky_relu", 0.0)
SILU = channel_norm_launch.Activation("silu", 0.0)


def of_channels(
    buffer: Tensor | None = None, bits: Tensor | None = BITS, packs: bool = True
) -> channel_norm_launch.Kept:
    kept = PACKED if buffer is None else buffer
    return channel_norm_launch.Kept(kept, bits, LAYOUT if packs else None)


KEPT = of_channels()
BITS_ALONE = channel_norm_launch.Kept(None, BITS, None)


def channel_norm(
    dtype: torch.dtype = BF16, adds: bool = False, affine: tuple[Any, Any] = (FP32, FP32),
    kept: Any = KEPT, how: Any = (CHANNELS, RELU), noise: Any = NOISE,
) -> None:  # fmt: skip
    x = rows(dtype)
    tables = vector(FP32), vector(FP32), *map(vector, affine)
    drawn = None if noise is None else Noise(noise, (3,))
    sources = x, x.clone() if adds else None
    channel_norm_launch.forward(sources, tables, (torch.empty_like(x), kept), how, drawn)


def channel_output(
    y: torch.dtype = BF16, affine: tuple[Any, Any] = (FP32, FP32), kept: Any = KEPT,
    how: Any = (CHANNELS, RELU),
) -> None:  # fmt: skip
    channel_norm_launch.output(kept, tuple(map(vector, affine)), rows(y), how)


def channel_sums(
    dy: torch.dtype = BF16, affine: tuple[Any, Any] = (FP32, FP32), kept: Any = KEPT,
    how: Any = (CHANNELS, RELU),
) -> None:  # fmt: skip
    channel_norm_launch.shares_of_sums(rows(dy), kept, tuple(map(vector, affine)), how)


def channel_input(
    dy: torch.dtype = BF16, dx: torch.dtype | None = BF16, given: bool = False,
    how: Any = (CHANNELS, RELU), kept: Any = KEPT,
) -> None:  # fmt: skip
    tables = (*[vector(FP32)] * 3, *[None if given else vector(FP32)] * 2)
    outputs = None, None if dx is None else rows(dx)
    channel_norm_launch.input_gradient(rows(dy), kept, tables, outputs, how)


def statistics(moved: Any = (FP32, FP32), tracked: bool = True) -> None:
    count = torch.zeros((), dtype=torch.int64) if tracked else None
    found = (torch.zeros(128), torch.zeros(128))
    running = *map(vector, moved), count
    channel_norm_tables_launch.statistics(found, torch.zeros(128), running, (1e-5, 0.1, 9))


def factors(weight: Any = FP32, wanted: Any = (FP32, FP32), count: int = 3) -> None:
    shares, rstd = torch.zeros(2, count, 128), torch.zeros(128)
    outputs = torch.zeros(3, 128), *map(vector, wanted)
    channel_norm_tables_launch.factors(shares, (rstd, vector(weight)), outputs, 9)


OTHERS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "a channel norm of another type": (channel_norm, {"dtype": FP32}),
    "a channel norm after a residual": (channel_norm, {"adds": True}),
    "a channel norm's weight of another type": (channel_norm, {"affine": (BF16, FP32)}),
    "a channel norm without a bias": (channel_norm, {"affine": (FP32, None)}),
    "a channel norm that keeps nothing": (channel_norm, {"kept": None, "noise": None}),
    "a channel norm that is rounded to nearest": (channel_norm, {"noise": None}),
    "a channel norm with another activation": (channel_norm, {"how": (CHANNELS, SILU)}),
    "a channel norm without bits": (channel_norm, {"kept": of_channels(bits=None)}),
    "a channel norm of long channels": (channel_norm, {"how": (LONG, RELU)}),
    "a channel norm that is kept exactly": (
        channel_norm,
        {"kept": of_channels(rows(), packs=False), "noise": None},
    ),
    "a channel norm that keeps bits alone": (
        channel_norm,
        {"kept": BITS_ALONE, "noise": None},
    ),
    "a channel norm's output of another type": (channel_output, {"y": FP32}),
    "a channel norm's output without a weight": (channel_output, {"affine": (None, FP32)}),
    "a channel norm's output of an exact one": (
        channel_output,
        {"kept": of_channels(rows(), packs=False)},
    ),
    "a channel norm's output with another activation": (
        channel_output,
        {"how": (CHANNELS, SILU)},
    ),
    "sums of another type": (channel_sums, {"dy": FP32}),
    "sums with a weight of another type": (channel_sums, {"affine": (BF16, FP32)}),
    "sums of what was kept exactly": (channel_sums, {"kept": of_channels(rows(), packs=False)}),
    "sums without bits": (channel_sums, {"kept": of_channels(bits=None)}),
    "sums with another activation": (channel_sums, {"how": (CHANNELS, SILU)}),
    "a channel norm's gradient of another type": (channel_input, {"dy": FP32}),
    "a channel norm's gradient in another type": (channel_input, {"dx": FP32}),
    "a channel norm's gradient with given factors": (channel_input, {"given": True}),
    "a channel norm's gradient by bits alone": (
        channel_input,
        {"given": True, "kept": BITS_ALONE},
    ),
    "a channel norm's gradient of long channels": (channel_input, {"how": (LONG, RELU)}),
    "statistics that do not run": (statistics, {"moved": (None, None)}),
    "statistics of another type": (statistics, {"moved": (BF16, BF16)}),
    "statistics that are not counted": (statistics, {"tracked": False}),
    "factors without a weight": (factors, {"weight": None}),
    "factors of a weight of another type": (factors, {"weight": BF16}),
    "factors without a bias's gradient": (factors, {"wanted": (FP32, None)}),
    "factors of many shares": (factors, {"count": 700}),
}
