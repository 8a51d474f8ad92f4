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


def rows(dtype: torch.dtype = BF16, count: int = 8) -> Tensor:
    return torch.zeros(count, 128, dtype=dtype)


def vector(dtype: torch.dtype | None = BF16) -> Tensor | None:
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


EXACT = of_channels(rows(), packs=False)
# What may differ of each launch.
OTHERS: dict[Callable[..., None], list[dict[str, Any]]] = {
    channel_norm: [
        {"dtype": FP32}, {"adds": True}, {"affine": (BF16, FP32)}, {"affine": (FP32, None)},
        {"kept": None, "noise": None}, {"noise": None}, {"how": (CHANNELS, SILU)},
        {"kept": of_channels(bits=None)}, {"how": (LONG, RELU)}, {"kept": EXACT, "noise": None},
        {"kept": BITS_ALONE, "noise": None},
    ],
    channel_output: [
        {"y": FP32}, {"affine": (None, FP32)}, {"kept": EXACT}, {"how": (CHANNELS, SILU)},
    ],
    channel_sums: [
        {"dy": FP32}, {"affine": (BF16, FP32)}, {"kept": EXACT}, {"kept": of_channels(bits=None)},
        {"how": (CHANNELS, SILU)},
    ],
    channel_input: [
        {"dy": FP32}, {"dx": FP32}, {"given": True}, {"given": True, "kept": BITS_ALONE},
        {"how": (LONG, RELU)},
    ],
    statistics: [{"moved": (None, None)}, {"moved": (BF16, BF16)}, {"tracked": False}],
    factors: [{"weight": None}, {"weight": BF16}, {"wanted": (FP32, None)}, {"count": 700}],
}  # fmt: skip
