"""Activation functions that keep their input packed.

`gelu` and `silu` keep x in 8 or 4 bits, where torch keeps x. A Linear behind them keeps act(x) as
well, unless it is unit_linear.py's: the backward kernel can make act(x) again in the pass that
makes dx. The operators are opaque to torch.compile and have fake implementations. No state; any
thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.compression.config import Compression
from vramx.errors import refused
from vramx.kernels import elementwise_launch
from vramx.nn import arguments, differentiation, keeping
from vramx.nn import reference_elementwise as reference
from vramx.nn.operators import operator

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
        group (see vramx/compression/codec/codec.py) and of mean zero; |gelu''| < 0.8.

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


def kind_of(approximate: str) -> str:
    """Return the kernels' word for an approximation of GELU."""
    if approximate not in APPROXIMATIONS:
        raise refused("approximate", approximate, APPROXIMATIONS)
    return APPROXIMATIONS[approximate]


def _activate(x: Tensor, kind: str, keep: Compression | None) -> Tensor:
    arguments.check_floats(x=x)
    form = keeping.form_of(keep, x)
    form[4] = keeping.order_of(x)
    y: Tensor = _activation(x, kind, form)[0]
    return y


# -- The function ----------------------------------------------------------------------------------


@operator(
    "vramx::activation", schema="(Tensor x, str kind, int[] form) -> (Tensor, Tensor, Tensor)"
)
def _activation(x: Tensor, kind: str, form: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Return act(x), the packed x, and its probe."""
    return *forward_pass(x, kind, form), *differentiation.probes_of((x,), form)


def forward_pass(x: Tensor, kind: str, form: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return act(x) and the packed x, None with NOTHING."""
    x = x.contiguous(memory_format=keeping.ORDERS[form[4]])
    if not keeping.served(x):
        return reference.activation(x, kind), keeping.pack_of(x, form)
    y = torch.empty_like(x)
    layout = keeping.fused_layout(x.numel(), form, elementwise_launch.WIDTHS)
    if layout is None:
        elementwise_launch.activation(x, y, x, None, kind, None)
        return y, keeping.pack_of(x, form)
    buffer = keeping.empty_buffer(x, form)
    elementwise_launch.activation(x, y, buffer, layout, kind, keeping.draw(x.device, form, 1))
    return y, buffer


@_activation.register_fake
def _(x: Tensor, _kind: str, form: Sequence[int]) -> tuple[Tensor | None, ...]:
    probes = differentiation.probes_of((x,), form)
    return keeping.dense_like(x, form[4]), keeping.empty_pack_of(x, form), *probes


@operator(
    "vramx::activation_backward", schema="(Tensor dy, Tensor kept, str kind, int[] form) -> Tensor"
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
