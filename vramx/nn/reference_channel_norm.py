"""Normalisation by channel in plain torch: the oracle of the kernels, the CPU path, and what double
backward differentiates.

`groups` is 0 for batch norm, whose channels are those of dimension 1, else the number of groups of
group norm, whose channels are pairs of sample and channel: by_channel() gives a view with either of
them in dimension 1, and a table has a value for each. Computed in float32, or in float64 if the
input is. Only differentiable tensor operations. Pure, any thread, any device; each function makes a
few temporary tensors of the size of its input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.nn import reference_elementwise as elementwise
from vramx.nn.reference_norm import wide

# Kinds that ask for the sign of what they are given only.
BY_SIGN = ("leaky_relu",)


class Shape(NamedTuple):
    """How a norm sees a tensor of some shape: the groups, 0 for batch norm."""

    groups: int
    sizes: torch.Size


def by_channel(x: Tensor, groups: int) -> Tensor:
    """Return a view, or a contiguous copy, with what is normalised together in dimension 1 on.

    Example:
        >>> by_channel(torch.ones(2, 3, 4, 4), 3).shape
        torch.Size([1, 6, 16])
    """
    return x.reshape(1, x.shape[0] * x.shape[1], -1) if groups else x


def along(table: Tensor, x: Tensor) -> Tensor:
    """Return a table in the shape that multiplies x by its dimension 1.

    Example:
        >>> along(torch.ones(3), torch.ones(2, 3, 4, 4)).shape
        torch.Size([1, 3, 1, 1])
    """
    return table.view(1, -1, *[1] * (x.dim() - 2))


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance: of channels, or of each sample's groups.

    Example:
        >>> statistics(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), 0)
        (tensor([2., 5.]), tensor([1., 0.]))
    """
    x = wide(x)
    if groups:
        x = x.reshape(1, x.shape[0] * groups, -1)
    variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    return mean, variance


def table_of(values: Tensor, shape: Shape) -> Tensor:
    """Return a value for each channel of a table, of those of channels or of samples' groups."""
    if shape.groups:
        return values.repeat_interleave(shape.sizes[1] // shape.groups)
    return values


def parameter_table(parameter: Tensor | None, shape: Shape) -> Tensor | None:
    """Return a parameter of the channels as a table."""
    if parameter is None or not shape.groups:
        return parameter
    return parameter.repeat(shape.sizes[0])


def activate(z: Tensor, kind: str, leak: float, passes: Tensor | None) -> Tensor:
    """Return act(z); `passes` says what ReLU or leaky ReLU pass, None: by z itself.

    Example:
        >>> activate(torch.tensor([-2.0, 2.0]), "leaky_relu", 0.5, None)
        tensor([-1.,  2.])
    """
    if kind == "none":
        return z
    if kind not in BY_SIGN:
        return elementwise.activation(z, kind)
    passes = ~(z <= 0) if passes is None else passes
    return torch.where(passes, z, z * leak if leak else z.new_zeros(()))


def activation_gradient(
    dy: Tensor, z: Tensor, kind: str, leak: float, passes: Tensor | None
) -> Tensor:
    """Return dy * act'(z); all are `wide`, and z is not read where `passes` is given.

    Example:
        >>> activation_gradient(torch.ones(2), torch.zeros(2), "silu", 0.0, None)
        tensor([0.5000, 0.5000])
    """
    if kind == "none":
        return dy
    if kind not in BY_SIGN:
        return elementwise.activation_backward(dy, z, kind)
    assert passes is not None
    return torch.where(passes, dy, dy * leak if leak else dy.new_zeros(()))


def affine(
    n: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Return n * weight + bias + residual; n and residual as by_channel() gives them."""
    if weight is not None:
        n = n * along(weight, n)
    if bias is not None:
        n = n + along(bias, n)
    return n if residual is None else n + residual


def normalise(x: Tensor, shape: Shape, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / sqrt(variance + eps) as by_channel() has x, and the table of factors.

    Example:
        >>> normalise(torch.tensor([[1.0], [3.0]]), Shape(0, torch.Size([2, 1])), 0.0)[0].tolist()
        [[-1.0], [1.0]]
    """
    mean, variance = statistics(x, shape.groups)
    rstd = table_of(torch.rsqrt(variance + eps), shape)
    view = by_channel(wide(x), shape.groups)
    return (view - along(table_of(mean, shape), view)) * along(rstd, view), rstd


def sums(g: Tensor, n: Tensor) -> Tensor:
    """Return tables of the sums of g and of g * n, which are `wide`.

    Example:
        >>> sums(torch.ones(2, 1), torch.full((2, 1), 3.0)).tolist()
        [[2.0], [6.0]]
    """
    others = [d for d in range(g.dim()) if d != 1]
    return torch.stack((g.sum(others), (g * n).sum(others)))


def factors(
    totals: Tensor, rstd: Tensor, weight: Tensor | None, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tables of dx = g * slope - offset - n * along, from those of sums()."""
    slope = rstd if weight is None else rstd * weight
    if not shape.groups:
        count = max(shape.sizes.numel() // max(shape.sizes[1], 1), 1)
        offset, along = totals * (slope / count)
        return slope, offset, along
    inside = shape.sizes[1] // shape.groups
    weighted = totals if weight is None else totals * weight
    mean = weighted.view(2, -1, inside).sum(2) / max(shape.sizes[2:].numel() * inside, 1)
    offset, along = mean.repeat_interleave(inside, 1) * rstd
    return slope, offset, along


def composition(
    x: Tensor,
    residual: Tensor | None,
    parameters: tuple[Tensor | None, Tensor | None],
    statistics: tuple[Shape, float, Tensor | None],
    activation: tuple[str, float, Tensor | None],
) -> Tensor:
    """Return the whole function, of x's shape.

    Args:
        statistics: the shape, eps, and a table of factors that are given: then nothing is
            subtracted, because x has no mean.
        activation: kind, leak and what passes, in x's shape.
    """
    shape, eps, given = statistics
    kind, leak, passes = activation
    if given is None:
        n, _ = normalise(x, shape, eps)
    else:
        n = by_channel(wide(x), shape.groups)
        n = n * along(given, n)
    weight, bias = (parameter_table(p, shape) for p in parameters)
    z = affine(n, weight, bias, None).reshape(shape.sizes)
    z = z if residual is None else z + residual
    return activate(z, kind, leak, passes)


def torchs_activation(y: Tensor, kind: str, leak: float) -> Tensor:
    """Apply torch's own function of a kind."""
    if kind == "leaky_relu":
        return F.leaky_relu(y, leak) if leak else F.relu(y)
    return y if kind == "none" else elementwise.activation(y, kind)
