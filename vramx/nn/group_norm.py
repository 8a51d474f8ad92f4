"""Group norm and instance norm that keep one packed tensor, with an activation behind them.

What is normalised together is a group of channels of one sample; in instance norm a channel. The
result is contiguous, as torch's own is on a GPU. What is kept, and what that costs, channel_norm.py
says. Instance norm with running statistics is torch's own. No state but parameters; any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.nn import arguments
from vramx.nn.channel_norm import ChannelNormed, activate, compute, norm_of


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | tuple[str, float] = "none",
    keep: Compression | None = None,
) -> ChannelNormed:
    """Normalise groups of channels of each sample, and apply an activation.

    Args:
        x: (samples, channels, ...), bfloat16, float16, float32 or float64.
        num_groups: divides the channels.
        weight, bias, activation, keep: as batch_norm()'s.

    Returns:
        ChannelNormed, as batch_norm() does; y is contiguous. Under autocast on a GPU y is float32,
        as torch's own.

    Raises:
        InvalidValueError: a shape or a type does not fit, or an argument is not accepted.

    Memory, Sync, Error bound, Double backward: as batch_norm()'s.

    Example:
        >>> x = torch.randn(4, 6, 8, 8)
        >>> y, _ = group_norm(x, 3)
        >>> torch.allclose(y, torch.nn.functional.group_norm(x, 3), atol=1e-6)
        True
    """
    arguments.check_floats(x=x)
    if x.dim() < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise InvalidValueError(
            f"num_groups {num_groups!r} is not accepted for x of shape {tuple(x.shape)}; accepted "
            "is a number that divides the channels"
        )
    if x.is_cuda and x.dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        x = x.float()  # as autocast does, which an operator does not see
    return _computed(x, (weight, bias), (num_groups, eps), activation, keep)


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | tuple[str, float] = "none",
    keep: Compression | None = None,
) -> ChannelNormed:
    """Normalise each channel of each sample, and apply an activation; see group_norm().

    Example:
        >>> x = torch.randn(4, 6, 8, 8)
        >>> y, _ = instance_norm(x)
        >>> torch.allclose(y, torch.nn.functional.instance_norm(x), atol=1e-6)
        True
    """
    arguments.check_floats(x=x)
    if x.dim() < 3 or x[0, :1].numel() < 2:
        accepted = "is (samples, channels, ...) with more values a channel than 1"
        raise arguments.misshaped("x", x, accepted)
    return _computed(x, (weight, bias), (x.shape[1], eps), activation, keep)


def _computed(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    how: tuple[int, float],
    activation: str | tuple[str, float],
    keep: Compression | None,
) -> ChannelNormed:
    norm = norm_of((x, None), affine, how, activation)
    return compute((x, None), affine, norm, None, keep).normed


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm that keeps one packed tensor: the same arguments, parameters and result.

    `activation` and `keep`, attributes, are group_norm()'s.

    Example:
        >>> GroupNorm(3, 6)(torch.randn(4, 6, 2)).shape
        torch.Size([4, 6, 2])
    """

    activation: str | tuple[str, float] = "none"
    keep: Compression | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        return self.normed(x).y

    def normed(self, x: Tensor) -> ChannelNormed:
        """Return group_norm()'s result, which a convolution takes."""
        return group_norm(
            x, self.num_groups, self.weight, self.bias, self.eps,
            activation=self.activation, keep=self.keep,
        )  # fmt: skip


class _InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    """What the modules of all dimensions are."""

    activation: str | tuple[str, float] = "none"
    keep: Compression | None = None

    def _apply_instance_norm(self, x: Tensor) -> Tensor:
        return self.normed(x).y

    def normed(self, x: Tensor) -> ChannelNormed:
        """Return instance_norm()'s result for a batch, which a convolution takes."""
        if self.track_running_stats:
            y = super()._apply_instance_norm(x)
            return ChannelNormed(activate(y, self.activation), None)
        return instance_norm(
            x, self.weight, self.bias, self.eps, activation=self.activation, keep=self.keep
        )


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """torch.nn.InstanceNorm1d that keeps one packed tensor, as InstanceNorm2d.

    Example:
        >>> InstanceNorm1d(3)(torch.randn(4, 3, 5)).shape
        torch.Size([4, 3, 5])
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """torch.nn.InstanceNorm2d that keeps one packed tensor: the same arguments, state and result.

    `activation` and `keep`, attributes, are instance_norm()'s.

    Example:
        >>> InstanceNorm2d(3)(torch.randn(4, 3, 5, 5)).shape
        torch.Size([4, 3, 5, 5])
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """torch.nn.InstanceNorm3d that keeps one packed tensor, as InstanceNorm2d.

    Example:
        >>> InstanceNorm3d(3)(torch.randn(4, 3, 2, 2, 2)).shape
        torch.Size([4, 3, 2, 2, 2])
    """
