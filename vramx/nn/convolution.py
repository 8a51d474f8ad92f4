"""Convolutions that keep their input packed, and share what a norm before them keeps.

Of a norm's result (batch_norm.py, group_norm.py) nothing is kept but what the norm keeps: its
output, with weight, bias and activation, is decoded in backward for the gradient of the weight. Of
a tensor one pack is kept, which several convolutions of it share. Convolutions and their gradients
are torch's own. No state but parameters; any thread.

Memory, kept: of a norm's result nothing more; of a tensor 1.047 bytes an element at 8 bits.
Temporary, in backward: the decoded input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError, refused
from vramx.nn import arguments
from vramx.nn.channel_norm import ChannelNormed, KeptChannels
from vramx.nn.channel_norm_passes import Norm
from vramx.nn.differentiation import attach
from vramx.nn.keeping import (
    AS_IT_IS,
    NOTHING,
    ORDERS,
    RAW,
    Kept,
    Spec,
    decode,
    in_order,
    kept_tensor,
    order_of,
    spec_for,
)
from vramx.nn.operators import operator
from vramx.nn.operators_channel_norm import channel_norm_output, input_again, output_again
from vramx.nn.operators_linear import keep_operator

Sizes = int | Sequence[int]
_NO_NORM = Norm(0, 0.0, "none", 0.0)
_gradients_of: Any = torch.ops.aten.convolution_backward.default


def conv2d(
    x: Tensor | ChannelNormed,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    keep: Compression | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Convolve, keeping x packed, or what the norm before keeps already.

    Args:
        x: (samples, channels, height, width), or the result of batch_norm() or group_norm(). With
            as many dimensions as the weight has, whatever that is: of one and of three spatial
            dimensions as well.
        weight, bias, stride, padding, dilation, groups: as torch.nn.functional.conv2d has them;
            padding in numbers.
        keep: how a plain tensor is kept, as batch_norm()'s; of no meaning for a norm's result. With
            level "keep" it is kept by torch, as torch's own would.
        kept: what keep_input() kept of x, to be shared. None: x is packed here.

    Returns:
        What torch.nn.functional.conv2d does.

    Raises:
        InvalidValueError: a tensor is not floating, or numbers of dimensions do not fit.

    Memory: see the head of this file. Where the weight needs no gradient nothing is kept.
    Sync: none.
    Error bound: results as torch's own. The weight's gradient is that of an input that is off by
        less than a step of its group times the norm's weight, unbiased behind ReLU and without an
        activation if rounding is stochastic; the input's gradient is exact.
    Double backward: works, on what was decoded.

    Example:
        >>> conv2d(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3)).shape
        torch.Size([1, 3, 2, 2])
    """
    y = x.y if isinstance(x, ChannelNormed) else x
    _check(y, weight, bias)
    y = y.to(arguments.autocast_dtype(y))
    geometry = _geometry(weight.dim() - 2, groups, stride, padding, dilation)
    found: Kept | KeptChannels | None = None
    if torch.is_grad_enabled() and weight.requires_grad:
        found = x.kept if isinstance(x, ChannelNormed) else kept
        found = keep_input(y, keep) if found is None else found
    elif torch.is_grad_enabled() and y.requires_grad:
        # torch's own keeps y, of which nothing is read but its shape.
        empty = y.new_empty(0, dtype=torch.uint8)
        found = kept_tensor(empty, empty, in_order(AS_IT_IS, order_of(y)))
    if found is None:
        return _convolve(y, weight, bias, geometry)
    result: Tensor = convolution_operator(y, weight, bias, *_flat(found), geometry)
    return result


def keep_input(x: Tensor, keep: Compression | None = None) -> Kept | None:
    """Keep a tensor for several convolutions of it; None where torch is to keep it as it is.

    Example:
        >>> x, weight = torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3, requires_grad=True)
        >>> kept = keep_input(x)
        >>> conv2d(x, weight, kept=kept).shape, conv2d(x, weight, padding=1, kept=kept).shape
        (torch.Size([1, 3, 2, 2]), torch.Size([1, 3, 4, 4]))
    """
    spec = spec_for(keep)
    if spec.bits in (NOTHING, RAW):
        return None
    spec = in_order(spec, order_of(x))
    # Convolutions of x are under autocast as well.
    x = x.to(arguments.autocast_dtype(x))
    buffer, probe = keep_operator(x, list(spec))
    return kept_tensor(buffer, probe, spec)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    arguments.check_floats(x=x, weight=weight, bias=bias)
    if weight.dim() not in (3, 4, 5) or x.dim() != weight.dim():
        raise InvalidValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; accepted are both of "
            "3, 4 or 5 dimensions"
        )


def _geometry(
    dimensions: int, groups: int, stride: Sizes, padding: Sizes, dilation: Sizes
) -> list[int]:
    """Return groups, and what is of each dimension, in a row."""
    geometry = [groups]
    for name, sizes in (("stride", stride), ("padding", padding), ("dilation", dilation)):
        each = [sizes] * dimensions if isinstance(sizes, int) else list(sizes)
        if len(each) == 1:
            each = each * dimensions
        if len(each) != dimensions or not all(isinstance(size, int) for size in each):
            raise refused(name, sizes, f"are a number or {dimensions} numbers")
        geometry += each
    return geometry


def _split(geometry: list[int]) -> tuple[list[int], list[int], list[int], int]:
    """Return stride, padding, dilation and groups."""
    groups, *sizes = geometry
    third = len(sizes) // 3
    return sizes[:third], sizes[third : 2 * third], sizes[2 * third :], groups


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: list[int]) -> Tensor:
    stride, padding, dilation, groups = _split(geometry)
    # Not torch.ops' function: its arguments take twice the host time.
    return torch.convolution(
        x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype),
        stride, padding, dilation, False, [0] * len(stride), groups,
    )  # fmt: skip


def _flat(kept: Kept | KeptChannels) -> tuple[Any, ...]:
    if isinstance(kept, Kept):
        none = (None,) * 4
        return kept.buffer, kept.probe, *none, *_NO_NORM, False, kept.dtype, list(kept.spec)
    tensors = (kept.buffer, kept.probe, kept.rstd, kept.bits, kept.weight, kept.bias)
    return *tensors, *kept.norm, kept.given, kept.dtype, list(kept.spec)


@operator(
    "vramx::convolution",
    schema="(Tensor y, Tensor weight, Tensor? bias, Tensor kept, Tensor probe, Tensor? rstd, "
    "Tensor? bits, Tensor? norm_weight, Tensor? norm_bias, int norm_groups, float eps, str kind, "
    "float leak, bool given, ScalarType stored, int[] spec, int[] geometry) -> Tensor",
)
def convolution_operator(
    y: Tensor, weight: Tensor, bias: Tensor | None, *for_backward: Any
) -> Tensor:
    """Return the convolution; all between bias and geometry is for backward."""
    return _convolve(y, weight, bias, for_backward[-1])


@convolution_operator.register_fake
def _(y: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    return _convolve(y, weight, bias, others[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    y, weight, bias, kept, probe, rstd, bits, norm_weight, norm_bias, *how = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(kept, probe, rstd, bits, norm_weight, norm_bias, weight)
    ctx.norm = Norm(*how[:4])
    ctx.given, ctx.stored, ctx.spec, ctx.geometry = how[4:]
    ctx.shape, ctx.dtype = y.shape, y.dtype
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 14
    if dy is None:
        return None, None, None, *none
    *kept, weight = ctx.saved_tensors  # once: a checkpoint gives them once
    wanted = list(ctx.needs_input_grad[:3])
    wanted[2] = wanted[2] and ctx.bias is not None
    if wanted[1]:
        y = _input(ctx, *kept)
    else:  # of it only shape and strides are read
        order = ORDERS[Spec(*ctx.spec).order]
        y = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=order)
    stride, padding, dilation, groups = _split(ctx.geometry)
    dx, dweight, dbias = _gradients_of(
        dy, y, weight.to(dy.dtype), None if ctx.bias is None else list(ctx.bias[0]),
        stride, padding, dilation, False, [0] * len(stride), groups, wanted,
    )  # fmt: skip
    return (
        dx if wanted[0] else None,
        dweight.to(weight.dtype) if wanted[1] else None,
        dbias.to(ctx.bias[1]) if wanted[2] else None,
        *none,
    )


def _input(
    ctx: Any, kept: Tensor, probe: Tensor, rstd: Tensor | None, bits: Tensor, weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return y again: by operations that have gradients themselves where they are asked for."""
    norm, spec = ctx.norm, Spec(*ctx.spec)
    if rstd is None:
        y = decode(kept, ctx.shape, ctx.dtype, spec)
        return attach(y, probe) if torch.is_grad_enabled() else y
    if torch.is_grad_enabled():
        x = input_again(kept, rstd, probe, norm.groups, spec)
        how = (rstd if ctx.given else None, bits, spec)
        return output_again(x, None, (weight, bias), norm, how).to(ctx.dtype)
    again: Tensor = channel_norm_output(
        kept, bits, weight, bias, list(ctx.shape), norm.groups, norm.kind, norm.leak,
        ctx.stored, ctx.dtype, ctx.spec,
    )  # fmt: skip
    return again


convolution_operator.register_autograd(_backward, setup_context=_setup)


class Conv2d(nn.Conv2d):
    """torch.nn.Conv2d that keeps its input packed: the same arguments and parameters.

    Takes a norm's result as well, and then keeps nothing of its own. `keep` as conv2d() has it.
    Padding by words and with other values than zero are torch's own.

    Example:
        >>> Conv2d(2, 3, 3)(torch.ones(1, 2, 4, 4)).shape
        torch.Size([1, 3, 2, 2])
    """

    keep: Compression | None = None

    def forward(self, x: Tensor | ChannelNormed) -> Tensor:
        """Return the convolution, as conv2d() does."""
        return convolved_by(self, x, self.keep)


class Conv3d(nn.Conv3d):
    """torch.nn.Conv3d that keeps its input packed, as Conv2d.

    Example:
        >>> Conv3d(2, 3, 3)(torch.ones(1, 2, 4, 4, 4)).shape
        torch.Size([1, 3, 2, 2, 2])
    """

    keep: Compression | None = None

    def forward(self, x: Tensor | ChannelNormed) -> Tensor:
        """Return the convolution, as conv2d() does."""
        return convolved_by(self, x, self.keep)


def convolved_by(
    module: Any, x: Tensor | ChannelNormed, keep: Compression | None, kept: Kept | None = None
) -> Tensor:
    """Return what a module of torch's computes of a batch."""
    y = x.y if isinstance(x, ChannelNormed) else x
    weight, bias = arguments.own(module, "weight"), arguments.own(module, "bias")
    if module.padding_mode != "zeros" or isinstance(module.padding, str) or y.dim() < 4:
        return module._conv_forward(y, weight, bias)  # type: ignore[no-any-return]
    return conv2d(
        x, weight, bias, module.stride, module.padding, module.dilation,
        module.groups, keep=keep, kept=kept,
    )  # fmt: skip
