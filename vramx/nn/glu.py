"""Gated linear units that keep gate and up packed.

torch keeps gate, up, act(gate) and, for the Linear that follows, z = act(gate) * up: 8 bytes an
element in bfloat16. `swiglu` and `geglu` keep gate and up at 1.047 bytes each; the Linear behind
them still keeps z, unless it is unit_linear.py's. The backward kernel decodes both and makes dgate
and dup, and z again where it is wanted, all in one pass. Each tensor has its own stream of noise.
No state; any thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.compression.config import Compression
from vramx.kernels import elementwise_launch
from vramx.nn import arguments, differentiation, keeping
from vramx.nn import reference_elementwise as reference
from vramx.nn.activation import kind_of
from vramx.nn.operators import operator

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
        (see vramx/compression/codec/codec.py) and of mean zero.

    Example:
        >>> swiglu(torch.zeros(3), torch.ones(3))
        tensor([0., 0., 0.])
    """
    return _gate(gate, up, "silu", keep)


def geglu(
    gate: Tensor, up: Tensor, approximate: str = "none", *, keep: Compression | None = None
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
def _glu(gate: Tensor, up: Tensor, kind: str, form: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Return z, the two packs, and the two probes."""
    return *forward_pass(gate, up, kind, form), *differentiation.probes_of((gate, up), form)


def forward_pass(
    gate: Tensor, up: Tensor, kind: str, form: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return z and the two packs, None with NOTHING."""
    gate, up = gate.contiguous(), up.contiguous()
    if not keeping.served(gate):
        return reference.glu(gate, up, kind), keeping.pack_of(gate, form), keeping.pack_of(up, form)
    z = torch.empty_like(gate)
    layout = keeping.fused_layout(gate.numel(), form, elementwise_launch.WIDTHS)
    if layout is None:
        elementwise_launch.glu((gate, up), z, (gate, up), None, kind, None)
        return z, keeping.pack_of(gate, form), keeping.pack_of(up, form)
    buffers = keeping.empty_buffer(gate, form), keeping.empty_buffer(up, form)
    noise = keeping.draw(gate.device, form, 2)
    elementwise_launch.glu((gate, up), z, buffers, layout, kind, noise)
    return z, *buffers


@_glu.register_fake
def _(gate: Tensor, up: Tensor, _kind: str, form: Sequence[int]) -> tuple[Tensor | None, ...]:
    packs = keeping.empty_pack_of(gate, form), keeping.empty_pack_of(up, form)
    return gate.new_empty(gate.shape), *packs, *differentiation.probes_of((gate, up), form)


@operator(
    "vramx::glu_backward",
    schema="(Tensor dz, Tensor gate, Tensor up, str kind, int[] form) -> (Tensor, Tensor)",
)
def _glu_backward(dz: Tensor, gate: Tensor, up: Tensor, kind: str, form: Sequence[int]) -> Pair:
    gradients, _ = backward_pass(dz.contiguous(), (gate, up), (kind, form), with_value=False)
    return gradients


@_glu_backward.register_fake
def _(dz: Tensor, _gate: Tensor, _up: Tensor, _kind: str, _form: Sequence[int]) -> Pair:
    return dz.new_empty(dz.shape), dz.new_empty(dz.shape)


def backward_pass(
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
