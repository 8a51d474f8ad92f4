"""What batch, group and instance norm share: the checks, the call, and what convolutions take.

The functions are in batch_norm.py and group_norm.py, the work is in operators_channel_norm.py. No
state; any thread. A call is one operator of some tens of microseconds of host time.

Memory, kept: 1.047 bytes an element at 8 bits in groups of 128, 0.125 more behind a ReLU, and 4
bytes a channel. The convolution that follows (convolution.py) keeps nothing more of y. Where
statistics are constants and the weight does not learn, a bit behind a ReLU is all: what follows
keeps y, which exactly kept has the signs.
Error bound: y as torch's own, and which gradients a ReLU passes. The normalised input is off by
less than a step of its group in backward, unbiased if rounding is stochastic: the gradients of x
and weight get that; those of bias and residual only behind another activation than ReLU's kinds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError, refused
from vramx.nn import arguments
from vramx.nn import reference_channel_norm as reference
from vramx.nn.channel_norm_passes import Norm
from vramx.nn.keeping import (
    AS_IT_IS,
    BY_SIGNS,
    NOTHING,
    SIGNS,
    Spec,
    in_order,
    order_of,
    spec_for,
)
from vramx.nn.operators_channel_norm import channel_norm

# What torch's leaky ReLU has by default.
DEFAULT_LEAK = 0.01
_ACTIVATIONS = {
    "none": ("none", 0.0),
    "relu": ("leaky_relu", 0.0),
    "leaky_relu": ("leaky_relu", DEFAULT_LEAK),
    "silu": ("silu", 0.0),
    "gelu": ("gelu", 0.0),
    "gelu_tanh": ("gelu_tanh", 0.0),
}


class Known(NamedTuple):
    """Statistics of channels that need not be found: mean and rstd, in float32 or wider.

    given: they are constants, and not of x.
    """

    mean: Tensor
    rstd: Tensor
    given: bool


class KeptChannels(NamedTuple):
    """What is kept of a norm by channel: all that gives its y again, but for a residual."""

    buffer: Tensor
    probe: Tensor
    rstd: Tensor
    bits: Tensor
    weight: Tensor | None
    bias: Tensor | None
    norm: Norm
    given: bool
    dtype: torch.dtype
    spec: Spec


class ChannelNormed(NamedTuple):
    """The result of a norm: `y`, and `kept`, for a convolution; None if it does not give y."""

    y: Tensor
    kept: KeptChannels | None


class Computed(NamedTuple):
    """A result, and the statistics that were found: nothing of meaning if they were known."""

    normed: ChannelNormed
    mean: Tensor
    var: Tensor


def norm_of(
    sources: tuple[Tensor, Tensor | None],
    affine: tuple[Tensor | None, Tensor | None],
    how: tuple[int, float],
    activation: str | tuple[str, float],
) -> Norm:
    """Check what compute() takes, and return the norm; `how` is groups and eps.

    Args:
        sources: x, and what is added before the activation.
        activation: a word, or "leaky_relu" and its slope.
    """
    _check(*sources, affine)
    return Norm(*how, *_activation(activation))


def compute(
    sources: tuple[Tensor, Tensor | None],
    affine: tuple[Tensor | None, Tensor | None],
    norm: Norm,
    known: Known | None,
    keep: Compression | None,
) -> Computed:
    """Compute what norm_of() has checked."""
    x, residual = sources
    mean, rstd, given = known or (None, None, False)
    spec = spec_for(keep)
    if given and spec.bits != NOTHING and is_linear(norm, affine[0]):
        spec = BY_SIGNS if any(map(learns, (x, residual, affine[1]))) else AS_IT_IS
    spec = in_order(spec, 0 if norm.groups else order_of(x))
    y, mean_found, var_found, rstd_found, buffer, bits, probe = channel_norm(
        x, residual, *affine, mean, rstd, given, *norm, list(spec)
    )
    kept = None
    if residual is None and spec.bits not in (SIGNS, NOTHING):
        rstd = rstd_found if rstd is None else rstd
        kept = KeptChannels(buffer, probe, rstd, bits, *affine, norm, given, x.dtype, spec)
    return Computed(ChannelNormed(y, kept), mean_found, var_found)


def learns(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def is_linear(norm: Norm, weight: Tensor | None) -> bool:
    """Tell whether no gradient of a norm by constants reads its input: of it signs at most."""
    return not learns(weight) and (norm.by_sign() or norm.kind == "none")


def activate(y: Tensor, activation: str | tuple[str, float]) -> Tensor:
    """Apply torch's own activation to what torch's own norm gave."""
    return reference.torchs_activation(y, *_activation(activation))


def _activation(activation: str | tuple[str, float]) -> tuple[str, float]:
    if isinstance(activation, tuple) and len(activation) == 2 and activation[0] == "leaky_relu":
        return "leaky_relu", float(activation[1])
    if activation not in _ACTIVATIONS:
        raise refused("activation", activation, _ACTIVATIONS, "('leaky_relu', slope)")
    return _ACTIVATIONS[activation]


def _check(x: Tensor, residual: Tensor | None, affine: tuple[Tensor | None, Tensor | None]) -> None:
    arguments.check_floats(x=x, residual=residual)
    if x.dim() < 2:
        raise arguments.misshaped("x", x, "is (samples, channels, ...)")
    if residual is not None:
        arguments.check_same_shape("x", x, "residual", residual)
        if residual.dtype != x.dtype:
            raise InvalidValueError(f"residual is of {residual.dtype}; accepted is x's {x.dtype}")
    check_vectors(x, weight=affine[0], bias=affine[1])


def check_vectors(x: Tensor, **vectors: Tensor | None) -> None:
    """Raise unless tensors are floating, and have a value for each channel of x."""
    channels = x.shape[1:2]
    arguments.check_floats(**vectors)
    for name, vector in vectors.items():
        if vector is not None and vector.shape != channels:
            raise arguments.misshaped(name, vector, f"is ({x.shape[1]},)")
