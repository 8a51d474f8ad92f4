"""Where a kept tensor was in autograd's graph, and derivatives of derivatives.

A buffer has lost its tensor's place in the graph, which the derivative of a derivative needs. A
probe holds that place: a tensor of the tensor's shape in one element of memory, an output of the
operator that keeps. attach() brings decoded values there; differentiable_gradients() differentiates
a composition of them. The gradient of a probe is one more of its input: add(). Costs two
microseconds of host time for each input, and nothing in a first backward. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.errors import VramxError
from vramx.nn.keeping import NOTHING, decode


def new_probe(x: Tensor) -> Tensor:
    """Return a tensor of x's shape and type in one element of memory, of no certain value."""
    return x.new_empty_strided(x.shape, (0,) * x.dim())


def probes_of(inputs: Sequence[Tensor], form: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Return the probes of inputs that an operator packs; None with NOTHING."""
    if form[0] == NOTHING:
        return (None,) * len(inputs)
    return tuple(map(new_probe, inputs))


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


def add(gradient: Tensor | None, dprobe: Tensor | None) -> Tensor | None:
    """Return the sum of a gradient and a probe's; None is zero."""
    if gradient is None or dprobe is None:
        return dprobe if gradient is None else gradient
    return gradient + dprobe


def save(
    ctx: Any, inputs: Sequence[Tensor], kept: Sequence[Tensor | None], *others: Tensor | None
) -> None:
    """Save packs of inputs, or with NOTHING these, for an operator's backward; and other tensors.

    ctx.form says how they are kept; `kept` is the packs and the probes. Inputs are of one shape and
    type, and the operator's first.
    """
    packs, probes = kept[: len(inputs)], kept[len(inputs) :]
    nothing = ctx.form[0] == NOTHING
    ctx.set_materialize_grads(False)
    # With NOTHING they are None, or of torch.library, which has no None, empty.
    constants = [each for each in kept if each is not None] if nothing else packs
    ctx.mark_non_differentiable(*constants)
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype
    # Not the empty probes: a checkpoint's hooks take microseconds for each tensor.
    saved_probes = (None for _ in probes) if nothing else probes
    ctx.save_for_backward(*(inputs if nothing else packs), *saved_probes, *others)


def attached(ctx: Any, kept: Sequence[Tensor], probes: Sequence[Tensor]) -> list[Tensor]:
    """Return what save() saved of the inputs, decoded and in their places in the graph."""
    if ctx.form[0] == NOTHING:
        return list(kept)
    return [
        attach(decode(each, ctx.shape, ctx.dtype, ctx.form), probe if needed else None)
        for each, probe, needed in zip(kept, probes, ctx.needs_input_grad, strict=False)
    ]


def differentiable_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], gradient: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of function(*inputs), themselves differentiable; None of a constant.

    Of several results `gradient` has as many.
    """
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
