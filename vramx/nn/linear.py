"""Linears that keep their input packed, and share what a norm before them keeps.

linears() takes a norm's result and any number of weights: nothing is kept but the norm's buffer;
backward decodes the norm's output once, weight and bias applied in the same pass, for the gradients
of all weights. Of a plain tensor they keep one pack. Products are torch's own. Here are also the
operators: vramx::linears, and vramx::keep, which packs a plain tensor. No state; any thread.

Memory, kept: of a norm's result nothing more; of a tensor 1.047 bytes an element at 8 bits.
Temporary, in backward: the decoded input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.nn import arguments, passes
from vramx.nn import reference_norm as reference
from vramx.nn.differentiation import attach, new_probe
from vramx.nn.keeping import (
    AS_IT_IS,
    NOTHING,
    RAW,
    Kept,
    Spec,
    decode,
    empty_buffer,
    encode,
    fields_of,
    kept_tensor,
    spec_for,
)
from vramx.nn.norm import Normed
from vramx.nn.operators import operator
from vramx.nn.operators_norm import input_again, norm_output
from vramx.nn.products import weight_gradient

Biases = Sequence[Tensor | None]


def linear(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None = None,
    keep: Compression | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Return x weight^T + bias, keeping x packed.

    Arguments and costs as linears()'s, for one weight.

    Example:
        >>> linear(torch.ones(2, 128), torch.ones(3, 128)).shape
        torch.Size([2, 3])
    """
    return linears(x, [weight], [bias], keep, kept)[0]


def linears(
    x: Tensor | Normed,
    weights: Sequence[Tensor],
    biases: Biases | None = None,
    keep: Compression | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, ...]:
    """Return x weight^T + bias for each weight, keeping one pack for all of them.

    Args:
        x: [..., in], a tensor, or the result of rms_norm() or layer_norm(), whose pack is used.
        weights: each [out, in].
        biases: as many, each [out] or None; None is none at all.
        keep: how a plain tensor is kept, as rms_norm()'s; of no meaning for a norm's result. With
            level "keep" it is kept by torch, as torch.nn.functional.linear would.
        kept: what already is kept of a plain tensor, whose elements x must have in their order: as
            scaled_dot_product_attention() says. None: x is packed here.

    Returns:
        Tensors [..., out] of the type of x, or of autocast.

    Raises:
        InvalidValueError: a shape does not fit, or the numbers of weights and biases, or a type:
            without autocast all are of one.

    Memory: see the head of this file. Under autocast the weights' casts are not kept but made
    again. Where no weight needs a gradient nothing is kept.
    Sync: none.
    Error bound: results as torch's own. The weights' gradients are those of an input that is off by
    at most a step of its group, unbiased if rounding is stochastic; the input's gradient is exact.
    Double backward: works, on what was decoded.

    Example:
        >>> from vramx.nn.norm import rms_norm
        >>> normed = rms_norm(torch.randn(4, 128))
        >>> q, k = linears(normed, [torch.randn(128, 128), torch.randn(32, 128)])
        >>> k.shape
        torch.Size([4, 32])
    """
    y = x.y if isinstance(x, Normed) else x
    biases = [None] * len(weights) if biases is None else biases
    _check(y, weights, biases)
    dtype = arguments.autocast_dtype(y)
    check_types(y, weights, dtype)
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    if isinstance(x, Normed):
        kept = x.kept
    check_kept(y, kept)
    y = y.to(dtype)
    if not learns or (kept and kept.spec.bits == NOTHING):
        kept = None
    if learns and passes.saves_are_brief():
        kept = kept_tensor(y, y, AS_IT_IS) if len(weights) > 1 else None
    elif learns and kept is None and not isinstance(x, Normed):
        kept = keep_tensor(y, keep)
    if kept is None:
        return tuple(
            functional.linear(y, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )
    terms = list(weights), without_none(biases, y)
    return tuple(linears_operator(y, *terms, *fields_of(kept), kept.dtype, list(kept.spec)))


class Linear(torch.nn.Linear):
    """torch.nn.Linear that keeps its input packed: the same arguments and parameters.

    Takes a norm's result as well, and then keeps nothing of its own. `keep` as linears() has it.

    Example:
        >>> Linear(128, 3)(torch.ones(2, 128)).shape
        torch.Size([2, 3])
    """

    keep: Compression | None = None

    def forward(self, x: Tensor | Normed) -> Tensor:
        """Return the product, as linear() does."""
        return linear(x, self.weight, self.bias, self.keep)


def without_none(biases: Biases, like: Tensor) -> list[Tensor]:
    """Return biases for an operator, whose lists have no room for None: empty tensors are none."""
    if all(bias is not None for bias in biases):
        return list(biases)  # type: ignore[arg-type]
    none = like.new_empty(0)
    return [none if bias is None else bias for bias in biases]


def keep_tensor(x: Tensor, keep: Compression | None) -> Kept | None:
    """Return what is kept of a tensor; None if it is to be kept as it is."""
    spec = spec_for(keep)
    if spec.bits == RAW:
        return None
    buffer, probe = keep_operator(x, list(spec))
    return kept_tensor(buffer, probe, spec)


def _check(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> None:
    arguments.check_floats(x=x)
    if not weights or len(biases) != len(weights):
        raise InvalidValueError(
            f"{len(weights)} weights and {len(biases)} biases are not accepted; accepted is at "
            "least one weight, and a bias or None for each"
        )
    for weight, bias in zip(weights, biases, strict=True):
        arguments.check_linear(x, weight, bias)


def check_kept(x: Tensor, kept: Kept | None) -> None:
    """Raise unless what is kept is of as many elements as x, on its device."""
    if kept is None or kept.spec.bits == NOTHING:
        return
    if kept.probe.numel() != x.numel() or kept.probe.device != x.device:
        raise InvalidValueError(
            f"kept is of {kept.probe.numel()} elements on {kept.probe.device}; accepted is what is "
            f"kept of x, {x.numel()} elements on {x.device}"
        )


def check_types(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise unless weights are of a type, or autocast will cast them."""
    for weight in weights:
        if weight.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise InvalidValueError(
                f"a weight is of {weight.dtype}; accepted without autocast is x's {dtype}"
            )


@operator("vramx::keep", schema="(Tensor x, int[] spec) -> (Tensor, Tensor)")
def keep_operator(x: Tensor, spec: list[int]) -> tuple[Tensor, Tensor]:
    """Return the buffer of a tensor and the probe that stands for it; `spec` is a width."""
    return encode(x, spec), new_probe(x)


@keep_operator.register_fake
def _(x: Tensor, spec: list[int]) -> tuple[Tensor, Tensor]:
    return empty_buffer(x, spec), new_probe(x)


def _keep_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[0])


def _keep_backward(_ctx: Any, _: None, dprobe: Tensor | None) -> tuple[Tensor | None, None]:
    return dprobe, None


keep_operator.register_autograd(_keep_backward, setup_context=_keep_setup)


@operator(
    "vramx::linears",
    schema="(Tensor y, Tensor[] weights, Tensor[] biases, Tensor kept, Tensor probe, Tensor? rstd, "
    "Tensor? norm_weight, Tensor? norm_bias, float eps, bool centred, ScalarType stored, "
    "int[] spec) -> Tensor[]",
)
def linears_operator(
    y: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    *_for_backward: Any,
) -> list[Tensor]:
    """Return the products; all but y, weights and biases (empty: none) is for backward."""
    # Cast by hand: autocast would cache a cast that autograd has not seen.
    return [
        functional.linear(y, weight.to(y.dtype), bias.to(y.dtype) if bias.numel() else None)
        for weight, bias in zip(weights, biases, strict=True)
    ]


@linears_operator.register_fake
def _(y: Tensor, weights: list[Tensor], *_others: Any) -> list[Tensor]:
    return [y.new_empty((*y.shape[:-1], weight.shape[0])) for weight in weights]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG001
    y, weights, biases, kept, probe, rstd, norm_weight, norm_bias, *how = inputs
    ctx.set_materialize_grads(False)
    # What is kept as it is has its own place in the graph.
    ctx.save_for_backward(
        kept, None if probe is kept else probe, rstd, norm_weight, norm_bias, *weights
    )
    ctx.eps, ctx.centred, ctx.stored, ctx.spec = how
    ctx.shape, ctx.dtype = y.shape, y.dtype
    ctx.bias_dtypes = [bias.dtype for bias in biases]


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    kept, probe, rstd, norm_weight, norm_bias, *weights = ctx.saved_tensors
    needs_y, needs_weights, needs_biases, *others = ctx.needs_input_grad
    flat = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
    dy = _input_gradient(flat, weights) if needs_y else None
    dweights: list[Tensor | None] = [None] * len(weights)
    wanted = [i for i, g in enumerate(flat) if g is not None and needs_weights[i]]
    if wanted:
        y = _input(ctx, kept, probe, rstd, (norm_weight, norm_bias))
        y = y.reshape(-1, y.shape[-1])
        for i in wanted:
            dweight = weight_gradient(flat[i], y, weights[i])  # type: ignore[arg-type]
            dweights[i] = dweight.to(weights[i].dtype)
    dbiases = [
        g.sum(0).to(dtype) if g is not None and need else None
        for g, need, dtype in zip(flat, needs_biases, ctx.bias_dtypes, strict=True)
    ]
    dy = None if dy is None else dy.view(ctx.shape)
    return dy, dweights, dbiases, *[None] * len(others)


def _input_gradient(gradients: list[Tensor | None], weights: list[Tensor]) -> Tensor | None:
    """Return the sum of the products, without a temporary for each."""
    total: Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is None:
            continue
        cast = weight.to(gradient.dtype)
        if total is None:
            total = gradient @ cast
        elif torch.is_grad_enabled():
            total = torch.addmm(total, gradient, cast)
        else:
            total.addmm_(gradient, cast)
    return total


def _input(
    ctx: Any,
    kept: Tensor,
    probe: Tensor | None,
    rstd: Tensor | None,
    affine: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    if torch.is_grad_enabled():
        return differentiable_input(ctx, kept, probe, rstd, affine)
    if ctx.spec[0] == NOTHING:
        return kept
    shape = list(ctx.shape)
    y: Tensor = norm_output(kept, *affine, shape, ctx.stored, ctx.dtype, ctx.spec)
    return y


def differentiable_input(
    ctx: Any,
    kept: Tensor,
    probe: Tensor | None,
    rstd: Tensor | None,
    affine: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Return the input again by operations that have gradients themselves.

    `ctx` has the input's shape and dtype, and eps, centred and spec of what is kept.
    """
    spec = Spec(*ctx.spec)
    if spec.bits == NOTHING:
        return kept
    assert probe is not None
    if rstd is None:
        return attach(decode(kept, probe.shape, ctx.dtype, spec), probe).view(ctx.shape)
    s = input_again(kept, rstd, probe, spec)
    normalised, _ = reference.normalise(s, ctx.eps, ctx.centred)
    return reference.affine(normalised, *affine).to(ctx.dtype)


linears_operator.register_autograd(_backward, setup_context=_setup)
