"""A block's whole feed-forward part that keeps nothing of its own: backward computes it again.

mlp() is the Linears, the gated unit or the activation, and the last Linear, in one operator. It
takes a norm's result and its pack; backward decodes that, computes gate and up by their products
again, and goes on as glu_linear() does. That costs one product more for each inner weight, and gate
and up are those of a decoded input. Here arguments are checked and types chosen; the work is in
operators_mlp.py. No state; any thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError, refused
from vramx.nn import arguments, linear
from vramx.nn import operators_mlp as _operators
from vramx.nn.keeping import AS_IT_IS, NOTHING, Kept, fields_of, kept_tensor
from vramx.nn.norm import Normed
from vramx.nn.reference_elementwise import KINDS


def mlp(
    x: Tensor | Normed,
    weights: Sequence[Tensor],
    biases: linear.Biases | None = None,
    *,
    activation: str = "gelu",
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return act(x W^T) V^T + residual for (W, V), (act(x G^T) * x U^T) V^T for (G, U, V).

    Args:
        x: (..., inputs), a tensor, or the result of rms_norm() or layer_norm(), whose pack is used.
        weights: two, or three for a gated unit: gate, up and down; each (outputs, inputs).
        biases: as many, each (outputs,) or None; None is none at all.
        activation: "silu", "gelu" or "gelu_tanh".
        residual: (..., outputs of the last weight), added to the result; without a bias the sum is
            rounded once, where a product and an addition round twice. None is none.
        keep: how a plain tensor is kept; None is int8; of no meaning for a norm's result. With
            level "keep" it is kept as it is.

    Raises:
        InvalidValueError: a number of weights, a type, a shape or `activation` is not accepted.

    Memory: kept: of a norm's result nothing, of a tensor one pack; it refers to the weights, whose
        casts under autocast are made again. Temporary: in forward one tensor for each inner weight;
        in backward these, the gradient of what goes into the last weight, and x.
    Sync: none.
    Error bound: the result is exact to rounding. Gradients are those at an input that is off by at
        most a step of its group (vramx/compression/codec/codec.py), of mean zero if rounding is
        stochastic.
    Double backward: works, on what was decoded.

    Example:
        >>> from vramx.nn.norm import rms_norm
        >>> x, inner = torch.ones(2, 128), torch.ones(256, 128)
        >>> mlp(rms_norm(x), [inner, inner, torch.ones(128, 256)], residual=x).shape
        torch.Size([2, 128])
    """
    y = x.y if isinstance(x, Normed) else x
    biases = [None] * len(weights) if biases is None else list(biases)
    check(y, weights, biases, activation)
    dtype = arguments.autocast_dtype(y)
    linear.check_types(y, weights, dtype)
    y = y.to(dtype)
    kept = kept_of(x, y, [y, *weights, *(bias for bias in biases if bias is not None)], keep)
    inside, outside = arguments.residual_for(y, weights[-1], residual)
    result: Tensor = _operators.mlp(
        y,
        list(weights),
        linear.without_none(biases, y),
        inside,
        activation,
        *fields_of(kept),
        kept.dtype,
        list(kept.spec),
    )
    return result if outside is None else result + outside


def kept_of(
    x: Tensor | Normed, y: Tensor, inputs: Sequence[Tensor], keep: Compression | None
) -> Kept:
    """Return what backward reads y from: a norm's pack, one that is made here, or y itself."""
    if isinstance(x, Normed) and x.kept.spec.bits != NOTHING:
        linear.check_kept(y, x.kept)
        return x.kept
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    kept = linear.keep_tensor(y, keep) if learns else None
    return kept_tensor(y, y, AS_IT_IS) if kept is None else kept


def check(x: Tensor, weights: Sequence[Tensor], biases: linear.Biases, activation: str) -> None:
    """Raise unless weights, biases and an activation's word fit each other and their input."""
    arguments.check_floats(x=x)
    if len(weights) not in (2, 3) or len(biases) != len(weights):
        raise InvalidValueError(
            f"{len(weights)} weights and {len(biases)} biases are not accepted; accepted are two "
            "or three weights, and a bias or None for each"
        )
    if activation not in KINDS:
        raise refused("activation", activation, KINDS)
    *inner, outer = zip(weights, biases, strict=True)
    for weight, bias in inner:
        arguments.check_linear(x.shape, weight, bias)
        arguments.check_same_shape("the first weight", weights[0], "another", weight)
    weight, bias = outer
    fits = weight.dim() == 2 and weight.shape[1] == weights[0].shape[0]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise InvalidValueError(
            f"the last weight has shape {tuple(weight.shape)} and its bias "
            f"{None if bias is None else tuple(bias.shape)}; accepted are (outputs, "
            f"{weights[0].shape[0]}) and (outputs,) or None"
        )
