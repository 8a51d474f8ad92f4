"""ReLU that keeps a bit an element: whether its gradient passes.

torch keeps the result, which a Linear or a convolution that follows shares. Where that keeps
something smaller, or nothing follows that needs it, the bit is all that is left. Not for an
approximation of the result: its zeros would be those of a lossy copy. The operators are opaque to
torch.compile and have fake implementations. No state; any thread; nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vramx.compression.codec import codec
from vramx.compression.codec.reference import unpack_mask
from vramx.compression.config import MASK_FORMAT
from vramx.kernels import elementwise_launch
from vramx.nn import arguments, keeping
from vramx.nn.operators import operator


def relu(x: Tensor) -> Tensor:
    """Apply max(x, 0) and keep a bit an element; the gradient is exact.

    Memory: keeps 0.125 bytes an element. A Linear or convolution that follows keeps the result,
    which torch's relu would share with it.

    Example:
        >>> relu(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    arguments.check_floats(x=x)
    keep = torch.is_grad_enabled() and x.requires_grad
    y: Tensor = _relu(x, keep, keeping.order_of(x))[0]
    return y


@operator("vramx::relu", schema="(Tensor x, bool keep, int order) -> (Tensor, Tensor)")
def _relu(x: Tensor, keep: bool, order: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=keeping.ORDERS[order])
    if keep and keeping.served(x):
        y = torch.empty_like(x)
        bits = _empty_bits(x)
        elementwise_launch.relu(x, y, bits)
        return y, bits
    passes = ~(keeping.flat_in(order, x) <= 0)
    bits = codec.pack(passes, MASK_FORMAT).buffer if keep else _empty_bits(x.new_empty(0))
    return torch.relu(x), bits


def _empty_bits(x: Tensor) -> Tensor:
    size_bytes = codec.bytes_of(x.numel(), MASK_FORMAT)
    return torch.empty(size_bytes, dtype=torch.uint8, device=x.device)


@_relu.register_fake
def _(x: Tensor, keep: bool, order: int) -> tuple[Tensor, Tensor]:
    return keeping.dense_like(x, order), _empty_bits(x if keep else x.new_empty(0))


@operator("vramx::relu_backward", schema="(Tensor dy, Tensor bits, int order) -> Tensor")
def _relu_backward(dy: Tensor, bits: Tensor, order: int) -> Tensor:
    dy = dy.contiguous(memory_format=keeping.ORDERS[order])
    dx = torch.empty_like(dy)
    if keeping.served(dy):
        elementwise_launch.relu_backward(dy, bits, dx)
        return dx
    rows, out = (dy.movedim(1, -1), dx.movedim(1, -1)) if order else (dy, dx)
    torch.where(unpack_mask(bits, dy.numel()).view(rows.shape), rows, rows.new_zeros(()), out=out)
    return dx


@_relu_backward.register_fake
def _(dy: Tensor, _bits: Tensor, order: int) -> Tensor:
    return keeping.dense_like(dy, order)


def _save_relu(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.order = inputs[2]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _differentiate_relu(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, None, None]:
    dx = None if dy is None else _relu_backward(dy, *ctx.saved_tensors, ctx.order)
    return dx, None, None


def _save_bits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, bits, ctx.order = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(bits)


def _differentiate_relu_backward(
    ctx: Any, gradient: Tensor | None
) -> tuple[Tensor | None, None, None]:
    # It is linear in dy: its derivative is itself, to any order.
    if gradient is None:
        return None, None, None
    return _relu_backward(gradient, *ctx.saved_tensors, ctx.order), None, None


_relu.register_autograd(_differentiate_relu, setup_context=_save_relu)
_relu_backward.register_autograd(_differentiate_relu_backward, setup_context=_save_bits)
