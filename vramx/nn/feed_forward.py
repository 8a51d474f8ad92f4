"""Two Linears with an activation between, in one operator that keeps what is between, packed.

As linears() and gelu_linear() one after the other: of a norm's result nothing is kept but the
norm's buffer, and of what the first Linear gives one pack. One operator spares the host autograd's
work between two, and over the casts of weights. A scale of the result (a vision network's layer
scale) is multiplied into the last Linear. Products are torch's own. No state; any thread; nothing
waits for the device.

Memory, kept: 1.047 bytes an element of the wide tensor at 8 bits; weights are referred to, and
their casts made again. Temporary: in forward two wide tensors; in backward two, and the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.nn import arguments, linear
from vramx.nn import reference_elementwise as reference
from vramx.nn.activation import backward_pass, forward_pass
from vramx.nn.differentiation import differentiable_gradients
from vramx.nn.keeping import AS_IT_IS, empty_buffer, fields_of, in_rows, spec_for
from vramx.nn.mlp import check, kept_of
from vramx.nn.norm import Normed
from vramx.nn.norm_kept import output_again
from vramx.nn.operators import operator
from vramx.nn.operators_linear import differentiable_input
from vramx.nn.products import cast, fake_weight_gradients, project, weight_gradients


class TwoLinears(NamedTuple):
    """The weights (outputs, inputs) and biases of two Linears, and what is done between them.

    `scale`, (outputs,) or None, is multiplied into what the last Linear gives.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    activation: str
    scale: Tensor | None = None


def two_linears(
    x: Tensor | Normed,
    terms: TwoLinears,
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return act(x W^T + b) V^T + c, times a scale, plus a residual.

    Args:
        x: (..., inputs), a tensor, or the result of rms_norm() or layer_norm(), whose pack is used.
        terms: of the two Linears; the activation is "silu", "gelu" or "gelu_tanh".
        residual: (..., outputs), added to the result; None is none.
        keep: how a plain tensor and what is between are kept; None is int8; with level "keep"
            as they are.

    Raises:
        InvalidValueError: a number of weights, a type, a shape or the activation is not accepted.

    Memory: see the head of this file.
    Sync: none.
    Error bound: as linears() and gelu_linear() have.
    Double backward: works, on the input that was decoded.

    Example:
        >>> terms = TwoLinears([torch.ones(8, 4), torch.ones(4, 8)], [None, None], "gelu")
        >>> two_linears(torch.ones(2, 4), terms).shape
        torch.Size([2, 4])
    """
    y = x.y if isinstance(x, Normed) else x
    weights, biases, kind, scale = terms
    check(y, weights, biases, kind)
    _check_scale(scale, weights)
    dtype = arguments.autocast_dtype(y)
    linear.check_types(y, weights, dtype)
    y = cast(y, dtype)
    inputs = [y, *weights, *[each for each in (*biases, scale) if each is not None]]
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    kept = kept_of(x, y, inputs, keep)
    inner, outer = weights
    form = in_rows(spec_for(keep), inner.shape[0]) if learns else AS_IT_IS
    inside, outside = arguments.residual_for(y, weights[-1], residual)
    inner_bias, outer_bias = biases
    result: Tensor = _two_linears(
        y, inner, inner_bias, outer, outer_bias, scale, inside, kind, list(form),
        *fields_of(kept), kept.dtype, list(kept.spec),
    )[0]  # fmt: skip
    return result if outside is None else result + outside


def _check_scale(scale: Tensor | None, weights: Sequence[Tensor]) -> None:
    if len(weights) != 2:
        raise InvalidValueError(f"{len(weights)} weights are not accepted; accepted are two")
    if scale is None:
        return
    arguments.check_floats(scale=scale)
    last = weights[1]
    if scale.shape != last.shape[:1] or scale.dtype != last.dtype:
        raise InvalidValueError(
            f"scale has shape {tuple(scale.shape)} and is of {scale.dtype}; accepted is "
            f"({last.shape[0]},) of the last weight's {last.dtype}"
        )


# -- The operators ---------------------------------------------------------------------------------


@operator(
    "vramx::two_linears",
    schema="(Tensor y, Tensor inner, Tensor? inner_bias, Tensor outer, Tensor? outer_bias, "
    "Tensor? scale, Tensor? residual, str kind, int[] form, Tensor kept, Tensor probe, "
    "Tensor? rstd, Tensor? norm_weight, Tensor? norm_bias, float eps, bool centred, "
    "ScalarType stored, int[] spec) -> (Tensor, Tensor)",
)
def _two_linears(
    y: Tensor, inner: Tensor, inner_bias: Tensor | None, outer: Tensor, outer_bias: Tensor | None,
    scale: Tensor | None, residual: Tensor | None, kind: str, form: Sequence[int],
    *_for_backward: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and the buffer of what is between, empty if `form` is NOTHING."""
    # Cast by hand: autocast would cache a cast that autograd has not seen.
    wide = F.linear(y, inner.to(y.dtype), None if inner_bias is None else inner_bias.to(y.dtype))
    value, pack = forward_pass(wide, kind, form)
    buffer = empty_buffer(wide, form) if pack is None else pack
    del wide
    bias = None if outer_bias is None else _scaled(outer_bias, scale, y.dtype)
    return project(value, _scaled(outer, scale, y.dtype), bias, residual), buffer


@_two_linears.register_fake
def _(
    y: Tensor, inner: Tensor, _inner_bias: Any, outer: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    form = others[4]
    wide = y.new_empty((*y.shape[:-1], inner.shape[0]))
    return y.new_empty((*y.shape[:-1], outer.shape[0])), empty_buffer(wide, form)


@operator(
    "vramx::two_linears_backward",
    schema="(Tensor dresult, Tensor buffer, Tensor kept, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor inner, Tensor outer, Tensor? outer_bias, Tensor? scale, str kind, int[] form, "
    "ScalarType stored, int[] spec, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _two_linears_backward(
    dresult: Tensor, buffer: Tensor, kept: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, inner: Tensor, outer: Tensor, outer_bias: Tensor | None,
    scale: Tensor | None, kind: str, form: Sequence[int], stored: torch.dtype, spec: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of y, inner and its bias, outer and its bias, and scale.

    Those of `needs`, empty for others; of the weights they have the weights' types.
    """
    dtype, shape = dresult.dtype, (*dresult.shape[:-1], inner.shape[1])
    rows = dresult.reshape(-1, dresult.shape[-1])
    gradient = rows @ _scaled(outer, scale, dtype)
    of_outer = needs[3] or needs[5]
    dwide, value = backward_pass(gradient, buffer, (kind, form), with_value=of_outer)
    del gradient
    of_bias = needs[4] or (needs[5] and outer_bias is not None)
    pair = weight_gradients(rows, value, outer, (of_outer, of_bias))
    del value
    last = _unscaled(pair, (outer, outer_bias), scale, needs[5])
    y = dwide  # not read
    if needs[1]:
        y = output_again(kept, (norm_weight, norm_bias), shape, (stored, dtype), spec)
    dinner, dbias = weight_gradients(dwide, y.view(-1, y.shape[-1]), inner, needs[1:3])
    dy = (dwide @ inner.to(dtype)).view(shape) if needs[0] else dwide.new_empty(0)
    return dy, cast(dinner, inner.dtype), dbias, *last


@_two_linears_backward.register_fake
def _(dresult: Tensor, *others: Any) -> tuple[Tensor, ...]:
    (inner, outer, outer_bias, scale), needs = others[4:8], others[-1]
    of_bias = needs[4] or (needs[5] and outer_bias is not None)
    dinner, dbias = fake_weight_gradients(inner, needs[1:3])
    douter, dlast = fake_weight_gradients(outer, (needs[3] or needs[5], of_bias))
    of_scale = outer.dtype if scale is None else scale.dtype
    return (
        dresult.new_empty((*dresult.shape[:-1], inner.shape[1]) if needs[0] else 0),
        dinner,
        dbias,
        douter,
        dlast.to(torch.promote_types(outer.dtype, of_scale)),
        outer.new_empty(0) if scale is None or not needs[5] else torch.empty_like(scale),
    )


def _scaled(term: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a weight or a bias times the scale of its rows, in a type."""
    if scale is None:
        return cast(term, dtype)
    rows = scale if term.dim() == 1 else scale.view(-1, 1)
    # Rounded in the same pass.
    return torch.mul(term, rows, out=torch.empty_like(term, dtype=dtype))


def _unscaled(
    gradients: tuple[Tensor, Tensor],
    terms: tuple[Tensor, Tensor | None],
    scale: Tensor | None,
    needs_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a weight, a bias and their scale from those of the products."""
    (dweight, dbias), (weight, bias) = gradients, terms
    none = weight.new_empty(0)
    if scale is None:
        return cast(dweight, weight.dtype), dbias, none
    dscale = none
    if needs_scale:
        dscale = (dweight * weight).sum(1)
        if bias is not None:
            dscale.addcmul_(dbias, bias)
    dbias = dbias * scale[: dbias.numel()]
    dweight = dweight * scale.view(-1, 1) if dweight.numel() else dweight
    return dweight.to(weight.dtype), dbias, dscale.to(scale.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, inner, inner_bias, outer, outer_bias, scale, residual, ctx.kind, ctx.form, *how = inputs
    kept, probe, rstd, norm_weight, norm_bias, ctx.eps, ctx.centred, ctx.stored, ctx.spec = how
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    # What is kept as it is has its own place in the graph.
    ctx.save_for_backward(
        output[1], kept, None if probe is kept else probe, rstd, norm_weight, norm_bias,
        inner, inner_bias, outer, outer_bias, scale,
    )  # fmt: skip
    ctx.shape, ctx.dtype, ctx.adds = y.shape, y.dtype, residual is not None


def _backward(ctx: Any, dresult: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    none = (None,) * 11
    if dresult is None:
        return *[None] * 7, *none
    # Read once: a checkpoint gives each tensor once.
    buffer, kept, probe, rstd, norm_weight, norm_bias, *terms = ctx.saved_tensors
    inner, inner_bias, outer, outer_bias, scale = terms
    needs, affine = list(ctx.needs_input_grad[:6]), (norm_weight, norm_bias)
    if torch.is_grad_enabled():
        y = differentiable_input(ctx, kept, probe, rstd, affine)
        found = differentiable_gradients(
            lambda *each: _composite(ctx.kind, *each), [y, *terms], dresult
        )
    else:
        found = _two_linears_backward(
            dresult, buffer, kept, *affine, inner, outer, outer_bias, scale,
            ctx.kind, ctx.form, ctx.stored, ctx.spec, needs,
        )  # fmt: skip
    gradients: list[Tensor | None] = [
        each if need else None for each, need in zip(found, needs, strict=True)
    ]
    for place, bias in ((2, inner_bias), (4, outer_bias)):
        gradient = gradients[place]
        if gradient is not None:
            gradients[place] = cast(gradient, bias.dtype)
    return *gradients, dresult if ctx.adds else None, *none


def _composite(
    kind: str, y: Tensor, inner: Tensor, inner_bias: Tensor | None, outer: Tensor,
    outer_bias: Tensor | None, scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the result, by operations that can be differentiated as often as one likes."""
    if scale is not None:
        outer = outer * scale.view(-1, 1)
        outer_bias = None if outer_bias is None else outer_bias * scale
    inner, outer = inner.to(y.dtype), outer.to(y.dtype)
    biases = (None if each is None else each.to(y.dtype) for each in (inner_bias, outer_bias))
    inner_bias, outer_bias = biases
    return F.linear(reference.activation(F.linear(y, inner, inner_bias), kind), outer, outer_bias)


_two_linears.register_autograd(_backward, setup_context=_setup)
