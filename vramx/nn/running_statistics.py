"""Running statistics of batch norm, and the statistics that they follow.

Where kernels serve, and nothing watches the operator, found_ahead() finds a batch's statistics
before the operator, and moves the running ones in the same launch. Elsewhere the operator finds
them, and update() moves the running ones by torch's operations: an operator with a gradient may
change no tensor. Running statistics are the caller's, and no gradient is theirs. Any thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from vramx.kernels import channel_norm_tables_launch as launch
from vramx.nn import channel_norm_passes as passes
from vramx.nn.arguments import own
from vramx.nn.channel_norm import Known
from vramx.nn.keeping import KERNEL_DTYPES, served
from vramx.nn.operators import below_autograd
from vramx.nn.operators_channel_norm import channel_norm


class Running(NamedTuple):
    """Running mean and variance, and the number of batches, each None if it is not kept."""

    mean: Tensor | None
    var: Tensor | None
    momentum: float | Tensor
    tracked: Tensor | None = None


def running_of(module: Any) -> Running:
    """Return what a module keeps; without a momentum the batch is counted first, as its weight."""
    mean, var = own(module, "running_mean"), own(module, "running_var")
    tracked, momentum = own(module, "num_batches_tracked"), module.momentum
    if momentum is not None:
        return Running(mean, var, momentum, tracked)
    if tracked is None:
        return Running(mean, var, 0.0)
    tracked.add_(1)
    return Running(mean, var, tracked.to(mean.dtype).reciprocal())


def found_ahead(x: Tensor, running: Running, eps: float) -> Known | None:
    """Return mean and rstd of a batch's channels, and update `running`; None: nothing is done."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return None
    if not served(x) or not _fits(x, running):
        return None
    changed = [each for each in (running.mean, running.var, running.tracked) if each is not None]
    if channel_norm.is_watched((x, *changed)):
        return None
    with below_autograd():
        mean, var = passes.statistics(x, 0)
        rstd = torch.empty_like(var)
        moved = running.mean, running.var, running.tracked
        momentum: Any = running.momentum
        launch.statistics((mean, var), rstd, moved, (eps, momentum, x.numel() // x.shape[1]))
    if changed:
        increment_version(changed)
    return Known(mean, rstd, False)


def _fits(x: Tensor, running: Running) -> bool:
    """Tell whether the kernel takes running statistics."""
    mean, var, momentum, tracked = running
    if (mean is None) != (var is None) or type(momentum) is not float:
        return False
    if tracked is not None and (tracked.dtype != torch.int64 or tracked.device != x.device):
        return False
    return all(
        each.dtype in KERNEL_DTYPES and each.device == x.device and each.is_contiguous()
        for each in (mean, var)
        if each is not None
    )


def update(running: Running, found: tuple[Tensor, Tensor], count: int) -> None:
    """Move running statistics to a batch's, which has `count` values a channel."""
    mean, var = found
    if running.tracked is not None:
        running.tracked.add_(1)
    if running.mean is None or running.var is None:
        return
    with torch.no_grad():
        weight: Any = running.momentum
        for old, new in ((running.mean, mean), (running.var, var * (count / (count - 1)))):
            old.lerp_(new.to(old.dtype), weight)
