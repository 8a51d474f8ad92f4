"""Where a kept tensor was in autograd's graph, and derivatives of derivatives.

A buffer has lost its tensor's place in the graph, which the derivative of a derivative needs. A
probe holds that place: a tensor of the tensor's shape in one element of memory, an output of the
operator that keeps (new_probe), or made in its setup_context (anchor_of). attach() brings decoded
values there; differentiable_gradients() differentiates a composition of them. Costs some
microseconds of host time for each input, and nothing in a first backward. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.errors import VramxError
from vramx.nn.keeping import NOTHING, PLAIN_TENSORS, decode


def new_probe(x: Tensor) -> Tensor:
    """Return a tensor of x's shape and type in one element of memory, of no certain value."""
    return x.new_empty(()).expand(x.shape)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return new_probe(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:  # noqa: ARG004
        return gradient


def anchor_of(tensor: Tensor) -> Tensor | None:
    """Return a probe of an input, None if it has no gradient; for a setup_context.

    Under a compiler's tracing there are none: it does not differentiate twice.
    """
    if not tensor.requires_grad or type(tensor) not in PLAIN_TENSORS:
        return None
    with torch.enable_grad():
        anchor: Tensor = _Anchor.apply(tensor)
    return anchor


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, probe: Tensor) -> Tensor:  # noqa: ARG004
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, gradient


def attach(value: Tensor, probe: Tensor | None) -> Tensor:
    """Return `value` in the place that `probe` has in autograd's graph; probe is not read."""
    if probe is None:
        return value.detach()
    return _Attach.apply(value, probe)  # type: ignore[no-any-return]


def save(
    ctx: Any, inputs: Sequence[Tensor], packs: Sequence[Tensor], *others: Tensor | None
) -> None:
    """Save packs of inputs, or with NOTHING these, for an operator's backward; and other tensors.

    ctx.form says how they are kept. They are of one shape and type.
    """
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*packs)
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype
    ctx.anchors = tuple(map(anchor_of, inputs))
    ctx.save_for_backward(*(inputs if ctx.form[0] == NOTHING else packs), *others)


def attached(ctx: Any, kept: Sequence[Tensor]) -> list[Tensor]:
    """Return what save() saved of the inputs, decoded and in their places in the graph."""
    return [
        attach(decode(each, ctx.shape, ctx.dtype, ctx.form), anchor)
        for each, anchor in zip(kept, ctx.anchors, strict=True)
    ]


def differentiable_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of function(*inputs), themselves differentiable; None of a constant."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not wanted:
        raise VramxError("no derivative of a derivative inside a compiled graph")
    with torch.enable_grad():
        found = iter(
            torch.autograd.grad(
                function(*inputs), wanted, gradient, create_graph=True, allow_unused=True
            )
        )
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)
