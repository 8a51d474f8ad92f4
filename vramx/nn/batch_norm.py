"""Batch norm that keeps one packed tensor, with an activation behind it: functions and modules.

Running statistics are updated as torch's are. With a residual, which is added before the
activation, this is the end of a residual block. What is kept, and what that costs, channel_norm.py
says. SyncBatchNorm is torch's own. Modules have state as torch's do; functions have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.nn import arguments
from vramx.nn.activation import gelu, silu
from vramx.nn.channel_norm import ChannelNormed, check_vector, compute


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | tuple[str, float] = "none",
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> ChannelNormed:
    """Normalise each channel, add a residual, and apply an activation.

    Args:
        x: (samples, channels, ...): bfloat16, float16, float32 or float64, in any memory format.
        running_mean, running_var: updated if `training`, where they are not None; else what is
            normalised by.
        weight, bias: (channels,) or None, of any floating type.
        momentum: of the update; may be a tensor of one element.
        activation: "none", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", or ("leaky_relu",
            slope).
        residual: of x's shape and type, or None.
        keep: how what backward needs is kept: bits, group_size, symmetric and rounding count, and
            with enabled=False it is kept exactly, as x's type has it; None is int8.

    Returns:
        ChannelNormed: y of x's type and memory format, and what conv2d() takes in its place; the
        latter is None with a residual and without grad mode.

    Raises:
        InvalidValueError: a shape or a type does not fit, an argument is not accepted, there is
            one value a channel to train with, or nothing to normalise by.

    Memory: kept as channel_norm.py says; nothing without grad mode. Temporary in backward: two
        tensors of x's size.
    Sync: none.
    Error bound: channel_norm.py's.
    Double backward: works, on what was decoded.

    Example:
        >>> x = torch.randn(4, 3, 8, 8)
        >>> y, _ = batch_norm(x, None, None, training=True, activation="relu")
        >>> torch.allclose(y, torch.nn.functional.batch_norm(x, None, None, training=True).relu())
        True
    """
    arguments.check_floats(x=x, running_mean=running_mean, running_var=running_var)
    for name, vector in (("running_mean", running_mean), ("running_var", running_var)):
        check_vector(name, vector, x)
    found = None
    if not training:
        if running_mean is None or running_var is None:
            raise InvalidValueError("running statistics of None are accepted in training only")
        found = (running_mean, running_var)
    elif x.numel() <= x.shape[1]:
        raise InvalidValueError(
            f"x has shape {tuple(x.shape)}; accepted in training are more values a channel than 1"
        )
    # Its derivative is of the sum, which the pack of the normalised x does not give.
    apart = residual is not None and activation in _SMOOTH
    computed = compute(
        (x, residual), (weight, bias), (0, eps, found), "none" if apart else activation, keep
    )
    if training and running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        _update((running_mean, running_var), (computed.mean, computed.var), momentum, count)
    if apart:
        return ChannelNormed(_smooth(computed.normed.y, str(activation), keep), None)
    return computed.normed


_SMOOTH = ("silu", "gelu", "gelu_tanh")


def _smooth(x: Tensor, activation: str, keep: Compression | None) -> Tensor:
    if activation == "silu":
        return silu(x, keep=keep)
    return gelu(x, "tanh" if activation == "gelu_tanh" else "none", keep=keep)


def _update(
    running: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor],
    momentum: float | Tensor,
    count: int,
) -> None:
    mean, var = found
    with torch.no_grad():
        for old, new in zip(running, (mean, var * (count / (count - 1))), strict=True):
            old.lerp_(new.to(old.dtype), momentum)


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """What the modules of all dimensions are: `activation` and `keep` are batch_norm()'s."""

    activation: str | tuple[str, float] = "none"
    keep: Compression | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return y."""
        return self.normed(x, residual).y

    def normed(self, x: Tensor, residual: Tensor | None = None) -> ChannelNormed:
        """Return batch_norm()'s result, which a convolution takes."""
        self._check_input_dim(x)
        return normed_by(self, x, residual, self.activation, self.keep)


def normed_by(
    module: Any,
    x: Tensor,
    residual: Tensor | None,
    activation: str | tuple[str, float],
    keep: Compression | None,
    updates: bool = True,
) -> ChannelNormed:
    """Return what a module of torch's computes, with an activation behind it.

    updates: whether running statistics change, where torch's would.
    """
    running = module.running_mean, module.running_var
    tracked = module.training and module.track_running_stats and updates
    momentum: float | Tensor = 0.0 if module.momentum is None else module.momentum
    if tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = module.num_batches_tracked.to(running[0].dtype).reciprocal()
    training = module.training or running == (None, None)
    if training and not tracked:
        running = None, None
    return batch_norm(
        x, *running, module.weight, module.bias, training, momentum, module.eps,
        activation=activation, residual=residual, keep=keep,
    )  # fmt: skip


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d that keeps one packed tensor: the same arguments, state and result.

    `activation` and `keep`, attributes, are batch_norm()'s.

    Example:
        >>> BatchNorm1d(3)(torch.randn(4, 3)).shape
        torch.Size([4, 3])
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """torch.nn.BatchNorm2d that keeps one packed tensor: the same arguments, state and result.

    `activation` and `keep`, attributes, are batch_norm()'s.

    Example:
        >>> norm = BatchNorm2d(3)
        >>> norm.activation = "relu"
        >>> norm(torch.randn(4, 3, 2, 2)).min() >= 0
        tensor(True)
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """torch.nn.BatchNorm3d that keeps one packed tensor: the same arguments, state and result.

    `activation` and `keep`, attributes, are batch_norm()'s.

    Example:
        >>> BatchNorm3d(3)(torch.randn(4, 3, 2, 2, 2)).shape
        torch.Size([4, 3, 2, 2, 2])
    """
