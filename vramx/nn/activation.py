"""Activation functions that keep their input packed, alone or with the Linear that follows.

`gelu` and `silu` keep x in 8 or 4 bits, where torch keeps x. A Linear
behind them would keep act(x) as well: `gelu_linear` and `silu_linear` keep the packed x only and
compute act(x) again in the backward kernel, in the pass that makes dx. The operators are opaque to
torch.compile and have fake implementations. No state; any thread; nothing waits for the device.
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
from vramx.nn.operators import operator
from vramx.nn.products import fake_weight_gradients, is_unread, project, weight_gradients

APPROXIMATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


def gelu(x: Tensor, approximate: str = "none", *, keep: Compression | None = None) -> Tensor:
    """Apply GELU and keep x packed.

    Args:
        x: bfloat16, float16, float32 or float64, any shape.
        approximate: "none" or "tanh", as torch's.
        keep: how x is kept: None is int8; with level "keep" as it is.

    Raises:
        InvalidValueError: `x` is no such tensor, or `approximate` no such word.

    Memory: keeps 1.047 bytes an element at 8 bits, 0.5625 at 4.
    Sync: none.
    Error bound: the result is exact to rounding. dx = dy * gelu'(x + e), |e| below the step of x's
        group (see vramx/compression/codec.py) and of mean zero; |gelu''| < 0.8.

    Example:
        >>> gelu(torch.zeros(3))
        tensor([0., 0., 0.])
    """
    return _activate(x, kind_of(approximate), keep)


def silu(x: Tensor, *, keep: Compression | None = None) -> Tensor:
    """Apply x * sigmoid(x) and keep x packed; see `gelu`. |silu''| <= 0.5.

    Example:
        >>> silu(torch.zeros(3))
        tensor([0., 0., 0.])
    """
    return _activate(x, "silu", keep)


def gelu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    approximate: str = "none",
    *,
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return gelu(x) weight^T + bias + residual and keep only x, packed.

    Args:
        x: (..., inputs), floating.
        weight: (outputs, inputs).
        bias: (outputs,) or None.
        approximate: "none" or "tanh".
        residual: (..., outputs), added to the result; without a bias the sum is rounded once, where
            a product and an addition round twice. None is none.
        keep: how x is kept: None is int8; with level "keep" as it is.

    Raises:
        InvalidValueError: a tensor's type or shape, or `approximate`, is not accepted.

    Memory: keeps the packed x and refers to weight; temporary in backward: x's size, which holds
        first the gradient of gelu(x) and then gelu(x).
    Sync: none.

    Example:
        >>> gelu_linear(torch.zeros(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    return _activate_linear(x, (weight, bias, residual), kind_of(approximate), keep)


def silu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return silu(x) weight^T + bias + residual and keep only x, packed; see `gelu_linear`.

    Example:
        >>> silu_linear(torch.zeros(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    return _activate_linear(x, (weight, bias, residual), "silu", keep)


def kind_of(approximate: str) -> str:
    """Return the kernels' word for an approximation of GELU."""
    if approximate not in APPROXIMATIONS:
        raise InvalidValueError(
            f"approximate {approximate!r} is not accepted; accepted are 'none' and 'tanh'"
        )
    return APPROXIMATIONS[approximate]


def _activate(x: Tensor, kind: str, keep: Compression | None) -> Tensor:
    arguments.check_floats(x=x)
    form = keeping.form_of(keep, x)
    form[4] = keeping.order_of(x)
    y: Tensor = _activation(x, kind, form)[0]
    return y


def _activate_linear(
    x: Tensor,
    terms: tuple[Tensor, Tensor | None, Tensor | None],
    kind: str,
    keep: Compression | None,
) -> Tensor:
    weight, bias, residual = terms
    arguments.check_floats(x=x, weight=weight, bias=bias)
    arguments.check_linear(x, weight, bias)
    bias, (x, weight) = arguments.cast_for_linear(bias, x, weight)
    inside, outside = arguments.residual_for(x, weight, residual)
    form = keeping.form_of(keep, *(tensor for tensor in (x, weight, bias) if tensor is not None))
    y: Tensor = _activation_linear(x, weight, bias, inside, kind, form)[0]
    return y if outside is None else y + outside


# -- The function ----------------------------------------------------------------------------------


@operator(
    "vramx::activation",
    schema="(Tensor x, str kind, int[] form) -> (Tensor, Tensor, Tensor)",
)
def _activation(x: Tensor, kind: str, form: Sequence[int]) -> tuple[Tensor, ...]:
    """Return act(x), the packed x, and its probe."""
    return *forward_pass(x, kind, form), *differentiation.probes_of((x,), form)


def forward_pass(x: Tensor, kind: str, form: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return act(x) and the packed x."""
    x = x.contiguous(memory_format=keeping.ORDERS[form[4]])
    if not keeping.served(x):
        return reference.activation(x, kind), keeping.encode(x, form)
    y = torch.empty_like(x)
    layout = keeping.fused_layout(x.numel(), form, elementwise_launch.WIDTHS)
    if layout is None:
        elementwise_launch.activation(x, y, x, None, kind, None)
        return y, keeping.encode(x, form)
    buffer = keeping.empty_buffer(x, form)
    elementwise_launch.activation(x, y, buffer, layout, kind, keeping.draw(x.device, form, 1))
    return y, buffer


@_activation.register_fake
def _(x: Tensor, _kind: str, form: Sequence[int]) -> tuple[Tensor, ...]:
    probes = differentiation.probes_of((x,), form)
    return keeping.dense_like(x, form[4]), keeping.empty_buffer(x, form), *probes


@operator(
    "vramx::activation_backward",
    schema="(Tensor dy, Tensor kept, str kind, int[] form) -> Tensor",
)
def _activation_backward(dy: Tensor, kept: Tensor, kind: str, form: Sequence[int]) -> Tensor:
    dy = dy.contiguous(memory_format=keeping.ORDERS[form[4]])
    dx, _ = backward_pass(dy, kept, (kind, form), with_value=False)
    return dx


@_activation_backward.register_fake
def _(dy: Tensor, _kept: Tensor, _kind: str, form: Sequence[int]) -> Tensor:
    return keeping.dense_like(dy, form[4])


def backward_pass(
    dy: Tensor,
    kept: Tensor,
    how: tuple[str, Sequence[int]],
    *,
    with_value: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dx and, where wanted, act(x); that is written over dy, which must be dense.

    `how` is kind and form; `in_place` allows to write over what was kept as it is.
    """
    kind, form = how
    if not keeping.served(dy):
        computed = reference.wide(dy)
        dtype = dy.dtype if form[0] == keeping.RAW else computed.dtype
        x = reference.wide(keeping.decode(kept, dy.shape, dtype, form))
        dx = reference.activation_backward(computed, x, kind).to(dy.dtype)
        return dx, reference.activation(x, kind).to(dy.dtype) if with_value else dy
    layout = keeping.fused_layout(dy.numel(), form, elementwise_launch.WIDTHS)
    if layout is None:
        x = keeping.decode(kept, dy.shape, dy.dtype, form)
        kept = x.contiguous(memory_format=keeping.ORDERS[form[4]])
    dx = kept if in_place and layout is None else torch.empty_like(dy)
    elementwise_launch.activation_backward(dy, kept, dx, dy if with_value else None, layout, kind)
    return dx, dy


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.kind, ctx.form = inputs
    differentiation.save(ctx, (x,), output[1:])


def _differentiate(
    ctx: Any, dy: Tensor | None, _: Any, dprobe: Tensor | None
) -> tuple[Tensor | None, None, None]:
    if dy is None:
        return dprobe, None, None
    kept, probe = ctx.saved_tensors
    if torch.is_grad_enabled():
        x = differentiation.attached(ctx, (kept,), (probe,))
        (dx,) = differentiation.differentiable_gradients(
            lambda x: reference.activation(x, ctx.kind), x, dy
        )
    else:
        dx = _activation_backward(dy, kept, ctx.kind, ctx.form)
    return differentiation.add(dx, dprobe), None, None


_activation.register_autograd(_differentiate, setup_context=_save)


# -- With the Linear that follows ------------------------------------------------------------------


@operator(
    "vramx::activation_linear",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str kind, int[] form) "
    "-> (Tensor, Tensor, Tensor)",
)
def _activation_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    kind: str,
    form: Sequence[int],
) -> tuple[Tensor, ...]:
    """Return the result, the packed x, and its probe."""
    if form[0] == keeping.NOTHING and is_unread(residual):
        value, buffer = x, keeping.encode(x, form)
    else:
        value, buffer = forward_pass(x, kind, form)
    result = project(value, weight, bias, residual)
    return result, buffer, *differentiation.probes_of((x,), form)


@_activation_linear.register_fake
def _(
    x: Tensor, weight: Tensor, _bias: Any, _residual: Any, _kind: str, form: Sequence[int]
) -> tuple[Tensor, ...]:
    result = x.new_empty(*x.shape[:-1], weight.shape[0])
    return result, keeping.empty_buffer(x, form), *differentiation.probes_of((x,), form)


@operator(
    "vramx::activation_linear_backward",
    schema="(Tensor dy, Tensor kept, Tensor weight, str kind, int[] form, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
)
def _activation_linear_backward(
    dy: Tensor, kept: Tensor, weight: Tensor, kind: str, form: Sequence[int], needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return _linear_gradients(dy, kept, weight, (kind, form), needs)


def _linear_gradients(
    dy: Tensor,
    kept: Tensor,
    weight: Tensor,
    how: tuple[str, Sequence[int]],
    needs: Sequence[bool],
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, the weight and the bias; arguments as backward_pass()'s.

    `needs` is of the weight and the bias.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    gradient = rows @ weight
    dx, value = backward_pass(gradient, kept, how, with_value=needs[0], in_place=in_place)
    dweight, dbias = weight_gradients(rows, value, weight, needs)
    return dx.view(*dy.shape[:-1], weight.shape[1]), dweight, dbias


@_activation_linear_backward.register_fake
def _(
    dy: Tensor, _kept: Tensor, weight: Tensor, _kind: str, _form: Sequence[int],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = dy.new_empty(*dy.shape[:-1], weight.shape[1])
    return dx, *fake_weight_gradients(weight, needs)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, ctx.kind, ctx.form = inputs
    ctx.adds = residual is not None
    ctx.is_made_again = passes.saves_are_unread()
    differentiation.save(ctx, (x,), output[1:], weight, bias)


def _differentiate_linear(
    ctx: Any, dy: Tensor | None, _: Any, dprobe: Tensor | None
) -> tuple[Any, ...]:
    if dy is None:
        return dprobe, None, None, None, None, None
    dresidual = dy if ctx.adds else None
    kept, probe, weight, bias = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[1:3])
    if not torch.is_grad_enabled():
        found: Any
        if ctx.is_made_again and passes.may_be_overwritten(kept):
            how = (ctx.kind, ctx.form)
            found = _linear_gradients(dy, kept.detach(), weight, how, needs, in_place=True)
        else:
            found = _activation_linear_backward(dy, kept, weight, ctx.kind, ctx.form, needs)
        dx, dweight, dbias = found
        terms: Sequence[Any] = dweight if needs[0] else None, dbias if needs[1] else None
    else:
        (x,) = differentiation.attached(ctx, (kept,), (probe,))
        dx, *terms = differentiation.differentiable_gradients(
            lambda x, w, b: F.linear(reference.activation(x, ctx.kind), w, b), (x, weight, bias), dy
        )
    return differentiation.add(dx, dprobe), *terms, dresidual, None, None


_activation_linear.register_autograd(_differentiate_linear, setup_context=_save_linear)
