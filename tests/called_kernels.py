"""Launchers of the codec as interpreted_kernels.py asks for them: on poison between guards."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from interpreted_kernels import GUARD_BYTES, POISON, Noise
from torch import Tensor

from vramx.kernels import launch
from vramx.kernels import noise as noise_functions


def run(name: str, read: Tensor, size_bytes: int, dtype: Any, *others: Any, **noise: Any) -> Tensor:
    """Run a launcher, and return what it wrote, with the guards around it."""
    guarded = torch.full((size_bytes + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8)
    written = guarded[GUARD_BYTES : guarded.numel() - GUARD_BYTES].view(dtype)
    getattr(launch, name)(read, written, *others, **noise)
    return guarded


@triton.jit
def _noise_kernel(
    out_ptr, seed_ptr, stream: tl.int64, block_ptr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    rows = tl.arange(0, ROWS)[:, None]
    block = tl.load(block_ptr)  # an argument would have the width of its value here
    values = noise_functions.noise_bytes(seed_ptr, stream, block, ROWS, COLS)
    tl.store(out_ptr + rows * COLS + tl.arange(0, COLS)[None, :], values)


def noise(block: int, rows: int, cols: int, noise: Noise) -> Tensor:
    out = torch.full((rows * cols,), -1)
    _noise_kernel[(1,)](
        out, noise.state(), noise.stream, torch.tensor([block]), ROWS=rows, COLS=cols
    )
    return out


def supported(device: str) -> bool:
    return launch.supported(torch.device(device))
