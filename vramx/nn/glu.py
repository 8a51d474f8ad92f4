"""Gated linear units that keep gate and up packed, alone or with the down projection.

torch keeps gate, up, act(gate) and, for the Linear that follows, z = act(gate) * up: 8 bytes an
element in bfloat16. `swiglu` and `geglu` keep gate and up at 1.047 bytes each; the Linear behind
them still keeps z. `glu_linear` is both in one operator: it keeps the two packed tensors only, and
its backward kernel decodes them, makes dgate and dup, and z again for the weight's gradient, all in
one pass. Each tensor has its own stream of noise. No state; any thread; nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.kernels import elementwise_launch
from vramx.nn import arguments, differentiation, keeping, passes
from vramx.nn import reference_elementwise as reference
from vramx.nn.activation import kind_of
from vramx.nn.operators import operator
from vramx.nn.products import fake_weight_gradients, is_unread, project, weight_gradients

Pair = tuple[Tensor, Tensor]


def swiglu(gate: Tensor, up: Tensor, *, keep: Compression | None = None) -> Tensor:
    """Return silu(gate) * up and keep both packed.

    Args:
        gate: bfloat16, float16, float32 or float64, any shape.
        up: the same shape.
        keep: how both are kept: None is int8; with level "keep" as they are.

    Raises:
        InvalidValueError: the types or the shapes are not accepted.

    Memory: keeps 2.03 bytes an element at 8 bits. A tensor that is not contiguous, such as half of
        a wider one, is copied for the time of the call.
    Sync: none.
    Error bound: the result is exact to rounding. dup = dz * silu(gate + e) and dgate =
        dz * (up + e') * silu'(gate + e), e and e' independent, each below the step of its group
        (see vramx/compression/codec.py) and of mean zero.

    Example:
        >>> swiglu(torch.zeros(3), torch.ones(3))
        tensor([0., 0., 0.])
    """
    return _gate(gate, up, "silu", keep)


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: str = "none",
    *,
    keep: Compression | None = None,
) -> Tensor:
    """Return gelu(gate) * up and keep both packed; see `swiglu`.

    Args:
        gate: floating, any shape.
        up: the same shape.
        approximate: "none" or "tanh".
        keep: how both are kept.

    Example:
        >>> geglu(torch.zeros(3), torch.ones(3), "tanh")
        tensor([0., 0., 0.])
    """
    return _gate(gate, up, kind_of(approximate), keep)


def glu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return (act(gate) * up) weight^T + bias + residual and keep only gate and up, packed.

    Args:
        gate: (..., inputs), floating.
        up: the same shape.
        weight: (outputs, inputs): the down projection.
        bias: (outputs,) or None.
        activation: "silu", "gelu" or "gelu_tanh".
        residual: (..., outputs), added to the result; without a bias the sum is rounded once, where
            a product and an addition round twice. None is none.
        keep: how gate and up are kept: None is int8; with level "keep" as they are.

    Raises:
        InvalidValueError: a type, a shape or `activation` is not accepted.

    Memory: keeps the two packed tensors and refers to weight; temporary in backward: one tensor of
        gate's size, which holds first the gradient of z and then z.
    Sync: none.

    Example:
        >>> glu_linear(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    if activation not in reference.KINDS:
        raise InvalidValueError(
            f"activation {activation!r} is not accepted; accepted are 'silu', 'gelu' and "
            "'gelu_tanh'"
        )
    arguments.check_floats(gate=gate, up=up, weight=weight, bias=bias)
    arguments.check_same_shape("gate", gate, "up", up)
    arguments.check_linear(gate, weight, bias)
    bias, (gate, up, weight) = arguments.cast_for_linear(bias, gate, up, weight)
    gate, up = arguments.cast_to_common(gate, up)
    inside, outside = arguments.residual_for(gate, weight, residual)
    inputs = [tensor for tensor in (gate, up, weight, bias) if tensor is not None]
    form = keeping.form_of(keep, *inputs)
    y: Tensor = _glu_linear(gate, up, weight, bias, inside, activation, form)[0]
    return y if outside is None else y + outside


def _gate(gate: Tensor, up: Tensor, kind: str, keep: Compression | None) -> Tensor:
    arguments.check_floats(gate=gate, up=up)
    arguments.check_same_shape("gate", gate, "up", up)
    gate, up = arguments.cast_to_common(gate, up)
    z: Tensor = _glu(gate, up, kind, keeping.form_of(keep, gate, up))[0]
    return z


# -- The product -----------------------------------------------------------------------------------


@operator(
    "vramx::glu",
    schema="(Tensor gate, Tensor up, str kind, int[] form) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _glu(gate: Tensor, up: Tensor, kind: str, form: Sequence[int]) -> tuple[Tensor, ...]:
    """Return z, the two packs, and the two probes."""
    return *_forward_pass(gate, up, kind, form), *differentiation.probes_of((gate, up), form)


def _forward_pass(
    gate: Tensor, up: Tensor, kind: str, form: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z and the two packs."""
    gate, up = gate.contiguous(), up.contiguous()
    if not keeping.served(gate):
        return reference.glu(gate, up, kind), keeping.encode(gate, form), keeping.encode(up, form)
    z = torch.empty_like(gate)
    layout = keeping.fused_layout(gate.numel(), form, elementwise_launch.WIDTHS)
    if layout is None:
        elementwise_launch.glu((gate, up), z, (gate, up), None, kind, None)
        return z, keeping.encode(gate, form), keeping.encode(up, form)
    buffers = keeping.empty_buffer(gate, form), keeping.empty_buffer(up, form)
    noise = keeping.draw(gate.device, form, 2)
    elementwise_launch.glu((gate, up), z, buffers, layout, kind, noise)
    return z, *buffers


@_glu.register_fake
def _(gate: Tensor, up: Tensor, _kind: str, form: Sequence[int]) -> tuple[Tensor, ...]:
    return gate.new_empty(gate.shape), *_empty_kept(gate, up, form)


def _empty_kept(gate: Tensor, up: Tensor, form: Sequence[int]) -> tuple[Tensor, ...]:
    packs = keeping.empty_buffer(gate, form), keeping.empty_buffer(up, form)
    return *packs, *differentiation.probes_of((gate, up), form)


@operator(
    "vramx::glu_backward",
    schema="(Tensor dz, Tensor gate, Tensor up, str kind, int[] form) -> (Tensor, Tensor)",
)
def _glu_backward(dz: Tensor, gate: Tensor, up: Tensor, kind: str, form: Sequence[int]) -> Pair:
    gradients, _ = _backward_pass(dz.contiguous(), (gate, up), (kind, form), with_value=False)
    return gradients


@_glu_backward.register_fake
def _(dz: Tensor, _gate: Tensor, _up: Tensor, _kind: str, _form: Sequence[int]) -> Pair:
    return dz.new_empty(dz.shape), dz.new_empty(dz.shape)


def _backward_pass(
    dz: Tensor,
    kept: Pair,
    how: tuple[str, Sequence[int]],
    *,
    with_value: bool,
    in_place: bool = False,
) -> tuple[Pair, Tensor]:
    """Return dgate, dup and, where wanted, z; that is written over dz, which must be contiguous.

    `how` is kind and form; `in_place` allows to write over what was kept as it is.
    """
    kind, form = how
    if not keeping.served(dz):
        computed = reference.wide(dz)
        gate, up = (keeping.decode(each, dz.shape, computed.dtype, form) for each in kept)
        dgate, dup, z = reference.glu_backward(computed, gate, up, kind)
        return (dgate.to(dz.dtype), dup.to(dz.dtype)), z.to(dz.dtype)
    layout = keeping.fused_layout(dz.numel(), form, elementwise_launch.WIDTHS)
    if layout is None:
        gate, up = (keeping.decode(each, dz.shape, dz.dtype, form).contiguous() for each in kept)
        kept = gate, up
    reuses = in_place and layout is None
    gradients = kept if reuses else (torch.empty_like(dz), torch.empty_like(dz))
    elementwise_launch.glu_backward(dz, kept, gradients, dz if with_value else None, layout, kind)
    return gradients, dz


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gate, up, ctx.kind, ctx.form = inputs
    differentiation.save(ctx, (gate, up), output[1:])


def _differentiate(
    ctx: Any, dz: Tensor | None, _: Any, __: Any, *dprobes: Tensor | None
) -> tuple[Any, ...]:
    if dz is None:
        return *dprobes, None, None
    gate, up, *probes = ctx.saved_tensors
    if torch.is_grad_enabled():
        gradients = differentiation.differentiable_gradients(
            lambda gate, up: reference.glu(gate, up, ctx.kind),
            differentiation.attached(ctx, (gate, up), probes),
            dz,
        )
    else:
        gradients = _glu_backward(dz, gate, up, ctx.kind, ctx.form)
    return *map(differentiation.add, gradients, dprobes), None, None


_glu.register_autograd(_differentiate, setup_context=_save)


# -- With the down projection ----------------------------------------------------------------------


@operator(
    "vramx::glu_linear",
    schema="(Tensor gate, Tensor up, Tensor weight, Tensor? bias, Tensor? residual, str kind, "
    "int[] form) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _glu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    kind: str,
    form: Sequence[int],
) -> tuple[Tensor, ...]:
    """Return the result, the two packs, and the two probes."""
    if form[0] == keeping.NOTHING and is_unread(residual):
        z, packs = gate, [keeping.encode(each, form) for each in (gate, up)]
    else:
        z, *packs = _forward_pass(gate, up, kind, form)
    result = project(z, weight, bias, residual)
    return result, *packs, *differentiation.probes_of((gate, up), form)


@_glu_linear.register_fake
def _(
    gate: Tensor, up: Tensor, weight: Tensor, _bias: Any, _residual: Any, _kind: str,
    form: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    result = gate.new_empty(*gate.shape[:-1], weight.shape[0])
    return result, *_empty_kept(gate, up, form)


@operator(
    "vramx::glu_linear_backward",
    schema="(Tensor dy, Tensor gate, Tensor up, Tensor weight, str kind, int[] form, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _glu_linear_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    kind: str,
    form: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _linear_gradients(dy, (gate, up), weight, (kind, form), needs)


def _linear_gradients(
    dy: Tensor,
    kept: Pair,
    weight: Tensor,
    how: tuple[str, Sequence[int]],
    needs: Sequence[bool],
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up, the weight and the bias; arguments as _backward_pass()'s.

    `needs` is of the weight and the bias.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    dz = rows @ weight
    (dgate, dup), z = _backward_pass(dz, kept, how, with_value=needs[0], in_place=in_place)
    shape = (*dy.shape[:-1], weight.shape[1])
    return dgate.view(shape), dup.view(shape), *weight_gradients(rows, z, weight, needs)


@_glu_linear_backward.register_fake
def _(
    dy: Tensor,
    _gate: Tensor,
    _up: Tensor,
    weight: Tensor,
    _kind: str,
    _form: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (*dy.shape[:-1], weight.shape[1])
    return dy.new_empty(shape), dy.new_empty(shape), *fake_weight_gradients(weight, needs)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gate, up, weight, bias, residual, ctx.kind, ctx.form = inputs
    ctx.adds = residual is not None
    ctx.is_made_again = passes.saves_are_unread()
    differentiation.save(ctx, (gate, up), output[1:], weight, bias)


def _differentiate_linear(
    ctx: Any, dy: Tensor | None, _: Any, __: Any, *dprobes: Tensor | None
) -> tuple[Any, ...]:
    if dy is None:
        return *dprobes, None, None, None, None, None
    dresidual = dy if ctx.adds else None
    gate, up, *probes, weight, bias = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[2:4])
    if not torch.is_grad_enabled():
        found: Any
        if ctx.is_made_again and passes.may_be_overwritten(gate, up):
            kept, how = (gate.detach(), up.detach()), (ctx.kind, ctx.form)
            found = _linear_gradients(dy, kept, weight, how, needs, in_place=True)
        else:
            found = _glu_linear_backward(dy, gate, up, weight, ctx.kind, ctx.form, needs)
        dgate, dup, dweight, dbias = found
        terms: Sequence[Any] = dweight if needs[0] else None, dbias if needs[1] else None
    else:
        dgate, dup, *terms = differentiation.differentiable_gradients(
            lambda gate, up, w, b: F.linear(reference.glu(gate, up, ctx.kind), w, b),
            (*differentiation.attached(ctx, (gate, up), probes), weight, bias),
            dy,
        )
    return *map(differentiation.add, (dgate, dup), dprobes), *terms, dresidual, None, None


_glu_linear.register_autograd(_differentiate_linear, setup_context=_save_linear)
