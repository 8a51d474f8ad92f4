"""Rotary position embedding of queries and keys that keeps cosines and sines only.

The rotation is linear in q and k, so that backward is the rotation by the transposed matrix. Both
are one kernel each for q and for k where there is one for the device and the shape, else plain
torch operations: so under torch.compile, whose compiler fuses them, and in derivatives of
derivatives. Hence it is an autograd function and not an operator, which compilers do not look into.
No state; any thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.errors import InvalidValueError
from vramx.kernels import rotary_launch
from vramx.nn import arguments
from vramx.nn.keeping import KERNEL_DTYPES, served
from vramx.nn.operators import apply_of


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q cos + turned(q) sin, and the same of k; turned swaps halves: (a, b) to (-b, a).

    Args:
        q: (..., tokens, size), size even; floating. The kernel takes (batch, heads, tokens, size).
        k: of the same size; its heads may be fewer.
        cos: broadcasts to q and to k without changing their shapes: (tokens, size), or
            (batch, 1, tokens, size) for (batch, heads, tokens, size).
        sin: of the shape of cos.

    Returns:
        Both, of the types that q cos and k cos have.

    Raises:
        InvalidValueError: a shape or a type is not accepted.

    Memory: keeps cos and sin, which all layers share. Temporary: none by a kernel, else two tensors
        of q's size.
    Sync: none.
    Error bound: exact to the roundings of one type.
    Double backward: works.

    Example:
        >>> q, k = torch.ones(1, 4, 8), torch.ones(1, 4, 8)
        >>> angles = torch.zeros(4, 8)
        >>> torch.equal(rotary(q, k, angles.cos(), angles.sin())[0], q)
        True
    """
    arguments.check_floats(q=q, k=k, cos=cos, sin=sin)
    arguments.check_same_shape("cos", cos, "sin", sin)
    for name, x in (("q", q), ("k", k)):
        if not _fits(x.shape, cos.shape):
            raise InvalidValueError(
                f"{name} has shape {tuple(x.shape)} and cos {tuple(cos.shape)}; accepted are an "
                "even last size, and a cos of that size that broadcasts to it"
            )
    if cos.requires_grad or sin.requires_grad:
        return _turn(q, cos, sin), _turn(k, cos, sin)
    apply = apply_of(_Rotation, q)
    if q.requires_grad != k.requires_grad:
        # A result of a function with an input that has a gradient has one as well.
        return apply(cos, sin, q)[0], apply(cos, sin, k)[0]
    turned: tuple[Tensor, Tensor] = apply(cos, sin, q, k)
    return turned


def _fits(x: Sequence[int], cos: Sequence[int]) -> bool:
    count = len(cos)
    if not x or x[-1] % 2 or not 0 < count <= len(x) or cos[-1] != x[-1]:
        return False
    return all(size in (1, most) for size, most in zip(cos, x[len(x) - count :], strict=True))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = [x.dtype for x in tensors]
        turned = []
        for x in tensors:
            if _has_kernel(x, cos, sin):
                dtype = x.dtype
                if dtype != cos.dtype:
                    dtype = torch.promote_types(dtype, cos.dtype)
                turned.append(_by_kernel(x, cos, sin, dtype, False))
            else:
                turned.append(_turn(x, cos, sin))
        return tuple(turned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dtypes = zip(gradients, ctx.dtypes, strict=True)
        return None, None, *(_gradient(each, cos, sin, dtype) for each, dtype in dtypes)


def _gradient(
    gradient: Tensor | None, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> Tensor | None:
    if gradient is None:
        return None
    if not torch.is_grad_enabled() and _has_kernel(gradient, cos, sin):
        return _by_kernel(gradient, cos, sin, dtype, True)
    return _turn_back(gradient, cos, sin).to(dtype)


def _has_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.dim() != 4 or x.stride(-1) != 1 or not served(x):
        return False
    alike = cos.stride() == sin.stride() and cos.stride(-1) == 1
    return alike and cos.dtype == sin.dtype and cos.dtype in KERNEL_DTYPES


def _by_kernel(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    y = torch.empty_like(x, dtype=dtype)
    rotary_launch.rotate(x, cos, sin, y, transposed=transposed)
    return y


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((-second, first), -1), sin)


def _turn_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply by the transposed matrix: also where the halves of sin are not alike."""
    first, second = (gradient * sin).chunk(2, -1)
    return torch.cat((second, -first), -1).add_(gradient * cos)
