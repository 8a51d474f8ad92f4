"""The operators of a feed-forward part that is computed again in backward.

    vramx::mlp           the result; it keeps no tensor of its own making
    vramx::mlp_backward  from what a norm, or mlp(), keeps of the input

weights are (gate, up, down), or two without a gate; biases as many, empty for none. Forward writes
the unit's result over gate; backward writes the gradients of gate and up over them, and the unit's
result over the gradient of it: with the input these are its temporary memory, and each is freed
when it has been used. Many rows go through some at a time (products.tiles), so that this memory
does not grow with a sequence. Arguments are trusted: mlp.py checks them. A call never waits; any
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.kernels import elementwise_launch
from vramx.nn import reference_elementwise as reference
from vramx.nn.differentiation import differentiable_gradients
from vramx.nn.keeping import served
from vramx.nn.norm_kept import output_again
from vramx.nn.operators import operator
from vramx.nn.operators_linear import differentiable_input
from vramx.nn.products import (
    WeightSums,
    cast,
    fake_weight_gradients,
    is_unread,
    project,
    project_into,
    tiles,
)

_KEPT = (
    "Tensor kept, Tensor probe, Tensor? rstd, Tensor? norm_weight, Tensor? norm_bias, float eps, "
    "bool centred, ScalarType stored, int[] spec"
)


@operator(
    "vramx::mlp",
    schema="(Tensor y, Tensor[] weights, Tensor[] biases, Tensor? residual, str kind, "
    f"{_KEPT}) -> Tensor",
)
def mlp(
    y: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    residual: Tensor | None,
    kind: str,
    *_for_backward: Any,
) -> Tensor:
    """Return the result; what follows `kind` is for backward."""
    *inner, (weight, bias) = _terms(weights, biases, y.dtype)
    if is_unread(residual):  # nothing of it is kept either
        return project(y, weight, bias, residual)
    rows = y.reshape(-1, y.shape[-1])
    parts = tiles(len(rows))
    if len(parts) == 1:
        return project(
            _unit([F.linear(y, *terms) for terms in inner], kind), weight, bias, residual
        )
    result = y.new_empty((*y.shape[:-1], weight.shape[0]))
    total = result.view(-1, weight.shape[0])
    added = None if residual is None else residual.reshape(total.shape)
    for part in parts:
        value = _unit([F.linear(rows[part], *terms) for terms in inner], kind)
        project_into(total[part], value, weight, bias, None if added is None else added[part])
        del value  # before the next is made
    return result


@mlp.register_fake
def _(y: Tensor, weights: list[Tensor], *_others: Any) -> Tensor:
    return y.new_empty((*y.shape[:-1], weights[-1].shape[0]))


@operator(
    "vramx::mlp_backward",
    schema="(Tensor dresult, Tensor[] weights, Tensor[] biases, str kind, Tensor kept, "
    "Tensor? norm_weight, Tensor? norm_bias, ScalarType stored, int[] spec, bool[] needs) "
    "-> Tensor[]",
)
def mlp_backward(
    dresult: Tensor, weights: list[Tensor], biases: list[Tensor], kind: str, kept: Tensor,
    norm_weight: Tensor | None, norm_bias: Tensor | None, stored: torch.dtype, spec: list[int],
    needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of y, of weights and of biases, those of `needs`; empty for others."""
    shape, dtype = (*dresult.shape[:-1], weights[0].shape[1]), dresult.dtype
    *inner, (outer, _) = _terms(weights, biases, dtype)
    y = output_again(kept, (norm_weight, norm_bias), shape, (stored, dtype), spec)
    y = y.view(-1, shape[-1])
    rows = dresult.reshape(-1, dresult.shape[-1])
    needs_y, needs_weights, needs_biases = _split(needs)
    sums = [
        WeightSums(*each)
        for each in zip(weights, zip(needs_weights, needs_biases, strict=True), strict=True)
    ]
    dy = y.new_empty(0)
    for part in tiles(len(rows)):
        inside = [F.linear(y[part], *terms) for terms in inner]
        slopes, value = _unit_backward(
            inside, rows[part] @ outer, kind, with_value=needs_weights[-1]
        )
        del inside
        sums[-1].add(rows[part], value)
        del value
        for i, (weight, _) in enumerate(inner):
            slope = slopes.pop(0)
            sums[i].add(slope, y[part])
            if needs_y and i == 0:
                dy = dy if dy.numel() else torch.empty_like(y)
                torch.mm(slope, weight, out=dy[part])
            elif needs_y:
                dy[part].addmm_(slope, weight)
            del slope
    dweights, dbiases = zip(*(each.results() for each in sums), strict=True)
    return [dy.view(shape) if needs_y else dy, *dweights, *dbiases]


@mlp_backward.register_fake
def _(dresult: Tensor, weights: list[Tensor], *others: Any) -> list[Tensor]:
    needs_y, needs_weights, needs_biases = _split(others[-1])
    shape = (*dresult.shape[:-1], weights[0].shape[1]) if needs_y else (0,)
    pairs = [
        fake_weight_gradients(weight, need)
        for weight, *need in zip(weights, needs_weights, needs_biases, strict=True)
    ]
    dweights, dbiases = zip(*pairs, strict=True)
    return [dresult.new_empty(shape), *dweights, *dbiases]


def _terms(
    weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor | None]]:
    return [
        (cast(weight, dtype), cast(bias, dtype) if bias.numel() else None)
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _split(needs: Sequence[bool]) -> tuple[bool, Sequence[bool], Sequence[bool]]:
    """Return the needs of y, of the weights and of the biases."""
    count = len(needs) // 2
    return needs[0], needs[1 : 1 + count], needs[1 + count :]


def _unit(inside: list[Tensor], kind: str) -> Tensor:
    """Return act(gate) * up, or act(x); a kernel writes it over the first."""
    first = inside[0]
    if not served(first):
        return _composite_unit(inside, kind)
    if len(inside) == 2:
        gate, up = inside
        elementwise_launch.glu((gate, up), gate, (gate, up), None, kind, None)
    else:
        elementwise_launch.activation(first, first, first, None, kind, None)
    return first


def _unit_backward(
    inside: list[Tensor], dvalue: Tensor, kind: str, *, with_value: bool
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of a unit's inputs and, where wanted, its result.

    A kernel writes them over the inputs and over dvalue: all are contiguous.
    """
    if not served(dvalue):
        return _reference_unit_backward(inside, dvalue, kind)
    value = dvalue if with_value else None
    if len(inside) == 2:
        gate, up = inside
        elementwise_launch.glu_backward(dvalue, (gate, up), (gate, up), value, None, kind)
        return [gate, up], dvalue
    (x,) = inside
    elementwise_launch.activation_backward(dvalue, x, x, value, None, kind)
    return [x], dvalue


def _reference_unit_backward(
    inside: list[Tensor], dvalue: Tensor, kind: str
) -> tuple[list[Tensor], Tensor]:
    dtype, wide = dvalue.dtype, [reference.wide(tensor) for tensor in inside]
    if len(wide) == 2:
        *slopes, value = reference.glu_backward(reference.wide(dvalue), wide[0], wide[1], kind)
    else:
        slopes = [reference.activation_backward(reference.wide(dvalue), wide[0], kind)]
        value = reference.activation(wide[0], kind)
    return [slope.to(dtype) for slope in slopes], value.to(dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    y, weights, biases, residual, ctx.kind, *how = inputs
    kept, probe, rstd, norm_weight, norm_bias, ctx.eps, ctx.centred, ctx.stored, ctx.spec = how
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(kept, probe, rstd, norm_weight, norm_bias, *weights, *biases)
    ctx.shape, ctx.dtype, ctx.count = y.shape, y.dtype, len(weights)
    ctx.adds = residual is not None


def _backward(ctx: Any, dresult: Tensor | None) -> tuple[Any, ...]:
    needs_y, needs_weights, needs_biases, *others = ctx.needs_input_grad
    if dresult is None:
        return None, [None] * ctx.count, [None] * ctx.count, *[None] * len(others)
    # Read once: a checkpoint gives each tensor once.
    kept, probe, rstd, norm_weight, norm_bias, *terms = ctx.saved_tensors
    affine, weights, biases = (norm_weight, norm_bias), terms[: ctx.count], terms[ctx.count :]
    needs = [needs_y, *needs_weights, *needs_biases]
    if torch.is_grad_enabled():
        y = differentiable_input(ctx, kept, probe, rstd, affine)
        inputs = [y, *weights, *(bias if bias.numel() else None for bias in biases)]
        found = differentiable_gradients(lambda *x: _composite(ctx.kind, *x), inputs, dresult)
    else:
        found = mlp_backward(
            dresult, weights, biases, ctx.kind, kept, *affine, ctx.stored, ctx.spec, needs
        )
    dy, *rest = (each if need else None for each, need in zip(found, needs, strict=True))
    dbiases = [
        each if each is None else each.to(bias.dtype)
        for each, bias in zip(rest[ctx.count :], biases, strict=True)
    ]
    dresidual = dresult if ctx.adds else None
    return dy, rest[: ctx.count], dbiases, dresidual, *[None] * (len(others) - 1)


def _composite(kind: str, y: Tensor, *terms: Tensor | None) -> Tensor:
    """Return the result, by operations that can be differentiated as often as one likes."""
    half = len(terms) // 2
    *inside, outer = zip(terms[:half], terms[half:], strict=True)
    *values, weight, bias = (_cast(t, y.dtype) for pair in (*inside, outer) for t in pair)
    hidden = [F.linear(y, w, b) for w, b in zip(values[::2], values[1::2], strict=True)]
    return F.linear(_composite_unit(hidden, kind), weight, bias)


def _composite_unit(inside: list[Tensor], kind: str) -> Tensor:
    if len(inside) == 2:
        return reference.glu(inside[0], inside[1], kind)
    return reference.activation(inside[0], kind)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype)


mlp.register_autograd(_backward, setup_context=_setup)
