"""What the elementwise functions share: how an input is kept, and derivatives of derivatives.

An operator takes the options of compression as a list of integers, its *form*, which is what a
schema can say: [bits, group size, symmetric, stochastic, order]. 0 bits: nothing is packed, the
inputs are saved as they are. The order is that of the elements in memory: an index of ORDERS. What
is packed travels as uint8 tensors that have no gradient.

A packed input no longer knows where it came from, which the derivative of a derivative needs. So an
operator also holds an anchor to it: a tensor of the input's shape, one element of memory and the
gradient's path to the input. It costs some microseconds of host time, and nothing in backward.
No state but caches; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.compression import random
from vramx.compression.config import Compression
from vramx.errors import InvalidValueError, VramxError
from vramx.kernels import elementwise_launch
from vramx.kernels.layout import Layout
from vramx.nn.kept import (
    DTYPES,
    RAW,
    Spec,
    attach,
    decode,
    encode,
    launches_on,
    new_probe,
    renew_noise,
    spec_of,
)

EXACT = [RAW, 128, 1, 0, 0]
ORDERS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_FUSED_BITS = 8


def form_of(keep: Compression | None, *inputs: Tensor) -> list[int]:
    """Return how inputs are kept: as the options say; not packed where nothing is differentiated.

    min_bytes, policy, offload, strict and deterministic are options of the hooks and not read.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return list(EXACT)
    spec = _spec(keep)
    return list(EXACT) if spec[0] == RAW else [*spec, 0]


@torch.compiler.assume_constant_result
def _spec(keep: Compression | None) -> tuple[int, ...]:
    return tuple(spec_of(keep))


def order_of(x: Tensor) -> int:
    """Return the order of a tensor's elements in memory that is to be kept: convolutions have one.

    Example:
        >>> order_of(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        1
    """
    order = {4: 1, 5: 2}.get(x.dim(), 0)
    if not order or x.is_contiguous() or not x.is_contiguous(memory_format=ORDERS[order]):
        return 0
    return order


def check_floats(**tensors: Tensor | None) -> None:
    """Raise unless all are floating tensors."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidValueError(f"{name} is a {type(tensor).__name__}; accepted is a tensor")
        if tensor.dtype not in DTYPES:
            raise InvalidValueError(
                f"{name} is a tensor of {tensor.dtype}; accepted are bfloat16, float16, float32 "
                "and float64"
            )


def check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless two tensors have one shape."""
    if tensor.shape != other.shape:
        raise InvalidValueError(
            f"{name} has shape {tuple(tensor.shape)} and {other_name} {tuple(other.shape)}; "
            "accepted are two tensors of one shape"
        )


def check_linear(inner: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless a weight and a bias fit what they are applied to."""
    fits = weight.dim() == 2 and inner.dim() > 0 and weight.shape[1] == inner.shape[-1]
    if not fits:
        raise InvalidValueError(
            f"weight has shape {tuple(weight.shape)} and its input {tuple(inner.shape)}; accepted "
            "is (outputs, inputs) with the input's last size"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidValueError(
            f"bias has shape {tuple(bias.shape)}; accepted is ({weight.shape[0]},)"
        )


def cast_for_linear(
    bias: Tensor | None, *tensors: Tensor
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Cast what goes into a Linear as autocast does; without autocast return it as it is."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return bias, tensors
    dtype = torch.get_autocast_dtype(kind)
    cast = tuple(tensor.to(dtype) for tensor in tensors)
    return None if bias is None else bias.to(dtype), cast


def cast_to_common(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the type that torch promotes them to."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


# -- Inside operators ------------------------------------------------------------------------------


def served(tensor: Tensor) -> bool:
    """Tell whether the kernels take a tensor."""
    return tensor.dtype != torch.float64 and launches_on(tensor.device)


def fused_layout(numel: int, form: Sequence[int]) -> Layout | None:
    """Return the layout that the kernels pack to and from; None where they do not."""
    if form[0] != _FUSED_BITS:
        return None
    return Layout(numel, form[0], form[1], bool(form[2]))


def dense_like(x: Tensor, order: int) -> Tensor:
    """Return a tensor like x, dense in an order, to be written."""
    return torch.empty_like(x, memory_format=ORDERS[order])


def packed_bytes(numel: int, form: Sequence[int]) -> int:
    """Return the bytes of a tensor of a form; 0 where nothing is packed."""
    return Layout(numel, form[0], form[1], bool(form[2])).buffer_bytes if form[0] else 0


def empty_pack(tensor: Tensor, form: Sequence[int]) -> Tensor:
    """Return a buffer for the packed form of a tensor, to be written."""
    size_bytes = packed_bytes(tensor.numel(), form)
    return torch.empty(size_bytes, dtype=torch.uint8, device=tensor.device)


def pack(tensor: Tensor, form: Sequence[int]) -> Tensor:
    """Pack a tensor, dense in its order, by a pass of its own; empty where nothing is packed."""
    if not form[0]:
        return empty_pack(tensor, form)
    renew_noise(tensor.device, Spec(*form[:4]))
    return encode(tensor.movedim(1, -1) if form[4] else tensor, Spec(*form[:4]))


def unpack(kept: Tensor, shape: Sequence[int], form: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what was kept, in a type; dense in its order."""
    if not form[0]:
        return kept.to(dtype)
    flat = decode(kept, torch.Size(shape).numel(), dtype, Spec(*form[:4]))
    if not form[4]:
        return flat.view(shape)
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def draw(device: torch.device, form: Sequence[int], count: int) -> elementwise_launch.Noise | None:
    """Return noise for `count` tensors that a kernel packs; None where it rounds to nearest."""
    if form[0] != _FUSED_BITS or not form[3]:
        return None
    renew_noise(device, Spec(*form[:4]))
    streams = tuple(random.next_stream() for _ in range(count))
    return elementwise_launch.Noise(random.state(device), streams)


# -- Derivatives of derivatives --------------------------------------------------------------------


class _Anchor(torch.autograd.Function):
    """A tensor of x's shape and one element of memory, whose gradient is x's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return new_probe(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:  # noqa: ARG004
        return gradient


def anchor_of(tensor: Tensor) -> Tensor | None:
    """Return an anchor to an input, None if it has no gradient; for a setup_context.

    Under a compiler's tracing there are none: it does not differentiate twice.
    """
    if not tensor.requires_grad or type(tensor) not in _PLAIN_TENSORS:
        return None
    with torch.enable_grad():
        anchor: Tensor = _Anchor.apply(tensor)
    return anchor


def decoded(kept: Tensor, ctx: Any, anchor: Tensor | None) -> Tensor:
    """Return what was kept, with the path to where it came from."""
    values = unpack(kept, ctx.shape, ctx.form, ctx.dtype)
    return values.detach() if anchor is None else attach(values, anchor)


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
