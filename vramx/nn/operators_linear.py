"""The operators of Linears that keep their input packed.

    vramx::keep     the pack of a plain tensor, and a probe for its place in the graph
    vramx::linears  products of one input, whose backward reads what a norm or vramx::keep keeps

Casts are made by hand and not kept. Arguments are trusted: linear.py checks them. A call never
waits; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from vramx.nn import reference_norm as reference
from vramx.nn import sides as beside
from vramx.nn.differentiation import attach, new_probe
from vramx.nn.keeping import NOTHING, Spec, decode, empty_buffer, encode
from vramx.nn.norm_kept import input_again
from vramx.nn.operators import operator
from vramx.nn.operators_norm import norm_output
from vramx.nn.products import bias_gradient, cast, weight_gradient


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
    schema="(Tensor y, Tensor[] weights, Tensor[] biases, Tensor[] sides, Tensor[] keys, "
    "int[] levels, Tensor kept, Tensor probe, Tensor? rstd, Tensor? norm_weight, "
    "Tensor? norm_bias, float eps, bool centred, ScalarType stored, int[] spec) -> Tensor[]",
)
def linears_operator(
    y: Tensor, weights: list[Tensor], biases: list[Tensor], sides: list[Tensor], keys: list[Tensor],
    levels: list[int], *_for_backward: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the products, those of weights first.

    There are as many biases as weights, or none at all. An empty bias or key is none.
    """
    dtype, own = y.dtype, []
    for i, weight in enumerate(weights):
        bias = cast(biases[i], dtype) if biases and biases[i].numel() else None
        own.append(functional.linear(y, cast(weight, dtype), bias))
    return own + [beside.product(y, side) for side in _drawn(sides, keys, levels)]


def _drawn(
    sides: Sequence[Tensor], keys: Sequence[Tensor], levels: Sequence[int]
) -> list[beside.Drawn]:
    if not sides:
        return []
    of_sides = levels[len(levels) - len(sides) :]
    return [
        beside.Drawn(weight, key if key.numel() else None, level)
        for weight, key, level in zip(sides, keys, of_sides, strict=True)
    ]


@linears_operator.register_fake
def _(
    y: Tensor, weights: list[Tensor], _biases: list[Tensor], sides: list[Tensor], *_others: Any
) -> list[Tensor]:
    shape = y.shape[:-1]
    own = [y.new_empty((*shape, weight.shape[0])) for weight in weights]
    return own + [side.new_empty((*shape, side.shape[0])) for side in sides]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG001
    y, weights, biases, sides, keys, ctx.levels, kept, probe, rstd, *affine_and_how = inputs
    norm_weight, norm_bias, *how = affine_and_how
    ctx.set_materialize_grads(False)
    # What is kept as it is has its own place in the graph.
    ctx.save_for_backward(
        kept, None if probe is kept else probe, rstd, norm_weight, norm_bias,
        *weights, *sides, *keys,
    )  # fmt: skip
    ctx.eps, ctx.centred, ctx.stored, ctx.spec = how
    ctx.shape, ctx.dtype = y.shape, y.dtype
    ctx.bias_dtypes, ctx.count = [bias.dtype for bias in biases], len(sides)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    kept, probe, rstd, norm_weight, norm_bias, *tensors = ctx.saved_tensors
    needs_y, needs_weights, needs_biases, needs_sides, *others = ctx.needs_input_grad
    flat = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
    count, own = ctx.count, len(flat) - ctx.count
    weights, (sides, keys) = tensors[:own], (tensors[own : own + count], tensors[own + count :])
    drawn = _drawn(sides, keys, ctx.levels)
    dy = _input_gradient(ctx.dtype, flat, weights, drawn) if needs_y else None
    needs = [
        need and g is not None for need, g in zip((*needs_weights, *needs_sides), flat, strict=True)
    ]
    found: list[Tensor | None] = [None] * len(flat)
    if any(needs):
        y = _input(ctx, kept, probe, rstd, (norm_weight, norm_bias))
        y = y.reshape(-1, y.shape[-1])
        for i, (need, gradient) in enumerate(zip(needs, flat, strict=True)):
            if need and gradient is not None:
                found[i] = (
                    cast(weight_gradient(gradient, y, weights[i]), weights[i].dtype)
                    if i < own
                    else beside.weight_gradient(gradient, y, drawn[i - own])
                )
    dbiases = [
        bias_gradient(g, dtype) if g is not None and need else None
        for g, need, dtype in zip(flat, needs_biases, ctx.bias_dtypes, strict=False)
    ]
    dy = None if dy is None else dy.view(ctx.shape)
    return dy, found[:own], dbiases, found[own:], [None] * count, *[None] * (len(others) - 1)


def _input_gradient(
    dtype: torch.dtype,
    gradients: list[Tensor | None],
    weights: list[Tensor],
    sides: list[beside.Drawn],
) -> Tensor | None:
    """Return the sum of the products, without a temporary for each that is of the type."""
    total: Tensor | None = None
    of_sides = gradients[len(weights) :]
    for gradient, weight in zip(gradients, weights, strict=False):
        if gradient is None:
            continue
        same = cast(weight, gradient.dtype)
        if total is None:
            total = gradient @ same
        elif torch.is_grad_enabled():
            total = torch.addmm(total, gradient, same)
        else:
            total.addmm_(gradient, same)
    for gradient, side in zip(of_sides, sides, strict=True):
        if gradient is not None:
            total = beside.add_input_gradient(total, gradient, side, dtype, in_place=True)
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
