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
from vramx.nn import running_statistics as statistics
from vramx.nn.activation import gelu, silu
from vramx.nn.arguments import own
from vramx.nn.channel_norm import (
    ChannelNormed,
    Known,
    check_vectors,
    compute,
    is_linear,
    norm_of,
)
from vramx.nn.channel_norm_passes import Norm
from vramx.nn.keeping import RAW, spec_for
from vramx.nn.running_statistics import Running, running_of


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
            with level "keep" it is kept exactly, as x's type has it; None is int8.

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
    running = Running(running_mean, running_var, momentum)
    return _batch_norm(
        (x, residual), running, (weight, bias), (training, eps), (activation, keep)
    )  # fmt: skip


def _batch_norm(
    sources: tuple[Tensor, Tensor | None],
    running: Running,
    affine: tuple[Tensor | None, Tensor | None],
    how: tuple[bool, float],
    activation_and_keep: tuple[str | tuple[str, float], Compression | None],
) -> ChannelNormed:
    """Return batch_norm()'s result; `how` is whether it trains, and eps."""
    x, residual = sources
    (training, eps), (activation, keep) = how, activation_and_keep
    norm = norm_of(sources, affine, (0, eps), activation)
    if residual is not None and activation in _SMOOTH:
        # Its derivative is of the sum, which the pack of the normalised x does not give.
        apart = True
    else:
        # Where y is kept as it is, for what follows, it has the signs.
        apart = activation == "relu" and not training and is_linear(norm, affine[0])
        apart = apart and spec_for(keep).bits == RAW
    norm = Norm(0, eps, "none", 0.0) if apart else norm
    _check(x, running, training)
    known = statistics.found_ahead(x, running, eps) if training else _constants(x, running, eps)
    computed = compute(sources, affine, norm, known, keep)
    if known is None:
        statistics.update(running, (computed.mean, computed.var), x.numel() // x.shape[1])
    if apart:
        return ChannelNormed(_activated(computed.normed.y, str(activation), keep), None)
    return computed.normed


def _check(x: Tensor, running: Running, training: bool) -> None:
    check_vectors(x, running_mean=running.mean, running_var=running.var)
    if not training:
        if running.mean is None or running.var is None:
            raise InvalidValueError("running statistics of None are accepted in training only")
    elif x.numel() <= x.shape[1]:
        raise arguments.misshaped("x", x, "in training are more values a channel than 1")


def _constants(x: Tensor, running: Running, eps: float) -> Known:
    assert running.mean is not None
    assert running.var is not None
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        return Known(running.mean.to(dtype), torch.rsqrt(running.var.to(dtype) + eps), True)


# Of frozen norms of transformers, in whose code it is.
_EPS = 1e-5
_SMOOTH = ("silu", "gelu", "gelu_tanh")


def _activated(x: Tensor, activation: str, keep: Compression | None) -> Tensor:
    if activation == "relu":
        return x.relu_()
    if activation == "silu":
        return silu(x, keep=keep)
    return gelu(x, "tanh" if activation == "gelu_tanh" else "none", keep=keep)


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
    # Norms of other classes are frozen, whatever mode they are said to be in.
    training = module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
    if not training:
        running = Running(own(module, "running_mean"), own(module, "running_var"), 0.0)
        training = running.mean is None and running.var is None
    elif module.track_running_stats and updates:
        running = running_of(module)
    else:
        running = Running(None, None, 0.0)
    affine = own(module, "weight"), own(module, "bias")
    how = training, getattr(module, "eps", _EPS)
    return _batch_norm((x, residual), running, affine, how, (activation, keep))


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
