"""Dropout that keeps no mask: backward draws the same one again, from a key of 16 bytes.

The key comes from torch's generator of the device, one small kernel a call. So torch.manual_seed
decides the masks, a torch.utils.checkpoint that runs a layer again gives it the mask that it had, a
CUDA graph draws a new key at every replay, and a compiler knows that two calls differ. From the key
on everything is a function: the operators have no state and any thread may call them. Nothing waits
for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vramx.errors import refused
from vramx.kernels import elementwise_launch
from vramx.nn import arguments, keeping
from vramx.nn import reference_elementwise as reference
from vramx.nn.operators import operator

# Values of an element's noise; as many are kept where nothing is dropped.
ALL_KEPT = 1 << 16


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Set each element to zero with probability p, and scale the others so that the mean stays.

    Args:
        x: bfloat16, float16, float32 or float64, any shape.
        p: 0 to 1; used is the nearest multiple of 2**-16 that is as far from 0 and 1 as p is not
            one of them. The scale belongs to the probability that is used.
        training: False returns x itself, as p = 0 does.

    Raises:
        InvalidValueError: `x` or `p` is not accepted.

    Memory: keeps 16 bytes, where torch keeps a byte an element.
    Sync: none.

    Example:
        >>> dropout(torch.ones(4), 1.0)
        tensor([0., 0., 0., 0.])
    """
    arguments.check_floats(x=x)
    kept = levels_kept(p)
    if not training or kept == ALL_KEPT:
        return x
    y: Tensor = _dropout(x, None, new_key(x), kept)
    return y


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Return dropout(x, p) + residual, in one pass; see `dropout`.

    Args:
        x: floating, any shape.
        residual: the same shape; the types are promoted as an addition does it.
        p: 0 to 1.
        training: False returns x + residual, as p = 0 does.

    Memory: keeps 16 bytes.

    Example:
        >>> dropout_add(torch.ones(4), torch.ones(4), 1.0)
        tensor([1., 1., 1., 1.])
    """
    arguments.check_floats(x=x, residual=residual)
    arguments.check_same_shape("x", x, "residual", residual)
    kept = levels_kept(p)
    if not training or kept == ALL_KEPT:
        return x + residual
    x, residual = arguments.cast_to_common(x, residual)
    y: Tensor = _dropout(x, residual, new_key(x), kept)
    return y


def levels_kept(p: float) -> int:
    """Return how many of 2**16 values of an element's noise keep it.

    Example:
        >>> levels_kept(0.25)
        49152
    """
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise refused("p", p, "are 0 to 1")
    if p in (0, 1):
        return ALL_KEPT if p == 0 else 0
    return min(max(round((1 - p) * ALL_KEPT), 1), ALL_KEPT - 1)


def new_key(x: Tensor) -> Tensor:
    """Draw a key from torch's generator of a tensor's device: int64[2]."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (2,), dtype=torch.int64, device=x.device)


def drop_again(x: Tensor, key: Tensor, kept: int, residual: Tensor | None = None) -> Tensor:
    """Return dropout(x) + residual with the mask of a key, for `kept` of 2**16 levels.

    The mask belongs to the order of x's elements: of the same elements in another shape it is the
    same. Where x is the gradient of what was dropped, the result is that of the input.
    """
    y: Tensor = _dropout(x, residual, key, kept)
    return y


@operator("vramx::dropout", schema="(Tensor x, Tensor? residual, Tensor key, int kept) -> Tensor")
def _dropout(x: Tensor, residual: Tensor | None, key: Tensor, kept: int) -> Tensor:
    if not keeping.served(x):
        return reference.dropout(x, residual, key, kept)
    x = x.contiguous()
    y = torch.empty_like(x)
    added = None if residual is None else residual.contiguous()
    elementwise_launch.dropout(x, added, y, key, kept)
    return y


@_dropout.register_fake
def _(x: Tensor, _residual: Tensor | None, _key: Tensor, _kept: int) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, residual, key, ctx.kept = inputs
    ctx.set_materialize_grads(False)
    ctx.adds = residual is not None
    ctx.save_for_backward(key)


def _differentiate(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    (key,) = ctx.saved_tensors
    # It is linear in x, by a diagonal matrix: the gradient is the operator itself, to any order.
    dx = _dropout(dy, None, key, ctx.kept) if ctx.needs_input_grad[0] else None
    return dx, dy if ctx.adds else None, None, None


_dropout.register_autograd(_differentiate, setup_context=_save)
