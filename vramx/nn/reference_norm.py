"""RMSNorm and LayerNorm in plain torch: the oracle of the kernels, the CPU path, and what double
backward differentiates.

Computed in float32, or in float64 if the input is; results have that type, but for the sum, which
has the input's. Only differentiable tensor operations. Pure, any thread, any device; each function
makes a few temporary tensors of the size of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return a tensor in the type that is computed in.

    Example:
        >>> wide(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x if x.dtype == torch.float64 else x.float()


def normalise(s: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Return s / sqrt(mean s**2 + eps) over the last dimension, of s - mean s if centred, and the
    factor 1 / sqrt(...), one a row.

    Example:
        >>> normalise(torch.tensor([3.0, -3.0]), 0.0, centred=True)
        (tensor([ 1., -1.]), tensor(0.3333))
    """
    s = wide(s)
    if centred:
        s = s - s.mean(-1, keepdim=True)
    rstd = torch.rsqrt((s * s).mean(-1, keepdim=True) + eps)
    return s * rstd, rstd.squeeze(-1)


def affine(normalised: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return normalised * weight + bias.

    Example:
        >>> affine(torch.ones(2), torch.tensor([2.0, 3.0]), None)
        tensor([2., 3.])
    """
    if weight is not None:
        normalised = normalised * weight
    return normalised if bias is None else normalised + bias


def gradient(
    dy: Tensor, normalised: Tensor, rstd: Tensor, weight: Tensor | None, centred: bool
) -> Tensor:
    """Return the gradient of the input of normalise() from that of affine()'s result.

    Example:
        >>> n, rstd = normalise(torch.tensor([1.0, 2.0, 4.0]), 0.0, centred=False)
        >>> gradient(n, n, rstd, None, centred=False).abs().max() < 1e-6
        tensor(True)
    """
    g = wide(dy) if weight is None else wide(dy) * weight
    along = (g * normalised).mean(-1, keepdim=True)
    inner = g - normalised * along
    if centred:
        inner = inner - g.mean(-1, keepdim=True)
    return inner * rstd.unsqueeze(-1)


def sums(dy: Tensor, normalised: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of affine()'s weight and bias.

    Example:
        >>> sums(torch.ones(2, 1), torch.full((2, 1), 3.0))
        (tensor([6.]), tensor([2.]))
    """
    hidden = dy.shape[-1]
    dy = wide(dy)
    return (dy * normalised).reshape(-1, hidden).sum(0), dy.reshape(-1, hidden).sum(0)
