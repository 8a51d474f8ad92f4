"""The second weight of a low-rank adapter: its product, added to a Linear's result in one pass.

base + scale (h weight^T + bias). torch would make the product, scale it and add it, each in a
tensor of the result's size. Kept for backward is h, of a rank's width, as it is. No state; any
thread; nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.nn import arguments
from vramx.nn.operators import operator
from vramx.nn.products import bias_gradient


def add_low_rank(
    base: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Return base + scale * (h weight^T + bias), of the type of base.

    Args:
        base: (..., outputs), floating.
        h: (..., rank): the product of the first weight.
        weight: (outputs, rank), of h's type, or autocast casts both.
        bias: (outputs,) or None.
        scale: a number.

    Raises:
        InvalidValueError: a type or a shape is not accepted.

    Memory: keeps h and refers to weight; temporary: nothing where h is of base's type, else tensors
        of base's size in h's type.
    Sync: none.
    Double backward: works.

    Example:
        >>> add_low_rank(torch.zeros(2, 3), torch.ones(2, 1), torch.ones(3, 1), scale=2.0)[0]
        tensor([2., 2., 2.])
    """
    arguments.check_floats(base=base, h=h, weight=weight, bias=bias)
    arguments.check_linear(h.shape, weight, bias)
    if base.shape != (*h.shape[:-1], weight.shape[0]):
        raise arguments.misshaped("base", base, f"is {(*h.shape[:-1], weight.shape[0])}")
    bias, (h, weight) = arguments.cast_for_linear(bias, h, weight)
    y: Tensor = _add_low_rank(base, h, weight, bias, float(scale))
    return y


@operator(
    "vramx::add_low_rank",
    schema="(Tensor base, Tensor h, Tensor weight, Tensor? bias, float scale) -> Tensor",
)
def _add_low_rank(
    base: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    if bias is not None or h.dtype != base.dtype:
        return torch.add(base, F.linear(h, weight, bias), alpha=scale).to(base.dtype)
    # Into a tensor of its own: FSDP warns of blocks that return views.
    y = base.new_empty(base.shape)
    rows, columns = base.reshape(-1, base.shape[-1]), h.reshape(-1, h.shape[-1])
    torch.addmm(rows, columns, weight.t(), alpha=scale, out=y.view(rows.shape))
    return y


@_add_low_rank.register_fake
def _(base: Tensor, *_others: Any) -> Tensor:
    return base.new_empty(base.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, h, weight, _, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, weight)


def _differentiate(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    h, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    rows = dy.reshape(-1, dy.shape[-1]).to(weight.dtype)
    # Scaled where it is small: of a rank's width.
    dh = (rows @ weight) * ctx.scale if needs[1] else None
    dweight = rows.t() @ (h.reshape(-1, h.shape[-1]) * ctx.scale) if needs[2] else None
    dbias = bias_gradient(rows, rows.dtype) * ctx.scale if needs[3] else None
    return dy, None if dh is None else dh.view(h.shape), dweight, dbias, None


_add_low_rank.register_autograd(_differentiate, setup_context=_save)
