"""What the functions of vramx.nn do first with their arguments: check them, and cast them.

A mistake raises InvalidValueError, which names the argument, its value and what is accepted. Casts
are those of torch's own functions under autocast, which operators do not see. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.errors import InvalidValueError
from vramx.nn.keeping import DTYPES


def misshaped(name: str, tensor: Tensor, accepted: str) -> InvalidValueError:
    """Return the error of a tensor that has another shape than is accepted."""
    return InvalidValueError(f"{name} has shape {tuple(tensor.shape)}; accepted {accepted}")


def check_floats(**tensors: Tensor | None) -> None:
    """Raise unless all are floating tensors."""
    for name, tensor in tensors.items():
        # Nothing else has one of these types.
        if tensor is not None and getattr(tensor, "dtype", None) not in DTYPES:
            raise _not_floating(name, tensor)


def _not_floating(name: str, value: object) -> InvalidValueError:
    if not isinstance(value, Tensor):
        return InvalidValueError(f"{name} is a {type(value).__name__}; accepted is a tensor")
    return InvalidValueError(
        f"{name} is a tensor of {value.dtype}; accepted are bfloat16, float16, float32 and float64"
    )


def check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless two tensors have one shape."""
    if tensor.shape != other.shape:
        raise InvalidValueError(
            f"{name} has shape {tuple(tensor.shape)} and {other_name} {tuple(other.shape)}; "
            "accepted are two tensors of one shape"
        )


def check_linear(inner: Sequence[int], weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless a weight and a bias fit what they are applied to, of a shape."""
    of = weight.shape
    if len(of) != 2 or not inner or of[1] != inner[-1]:
        raise InvalidValueError(
            f"weight has shape {tuple(of)} and its input {tuple(inner)}; accepted is (outputs, "
            "inputs) with the input's last size"
        )
    if bias is not None and bias.shape != of[:1]:
        raise misshaped("bias", bias, f"is ({weight.shape[0]},)")


def residual_for(
    x: Tensor, weight: Tensor, residual: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return a residual for the inside of a Linear's operator, or one to add to its result.

    Inside only where it has the type of x, which is the result's: an addition would promote others.
    """
    if residual is None:
        return None, None
    check_floats(residual=residual)
    shape = (*x.shape[:-1], weight.shape[0])
    if residual.shape != shape:
        raise misshaped("residual", residual, f"is the result's {shape}")
    return (residual, None) if residual.dtype == x.dtype else (None, residual)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the type that autocast computes products of x in; without autocast its own."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def cast_for_linear(
    bias: Tensor | None, *tensors: Tensor
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Cast what goes into a Linear as autocast does; without autocast return it as it is."""
    first = tensors[0]
    if not torch.is_autocast_enabled(first.device.type) or first.dtype == torch.float64:
        return bias, tensors
    dtype = autocast_dtype(first)
    cast = tuple([t if t.dtype == dtype else t.to(dtype) for t in tensors])
    return None if bias is None else bias.to(dtype), cast


def sum_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    """Return the type that torch promotes a sum to; None adds nothing."""
    if residual is None or residual.dtype == x.dtype:
        return x.dtype
    return torch.promote_types(x.dtype, residual.dtype)


def cast_to_common(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the type that torch promotes them to."""
    first = dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != first:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple([t if t.dtype == dtype else t.to(dtype) for t in tensors])


def own(module: Any, name: str) -> Any:
    """Return a part, a parameter or a buffer of a module, or what stands in its place, or None.

    A module looks for them when Python has not found such an attribute, which takes a microsecond.
    """
    state = module.__dict__
    if name in state["_modules"]:
        return state["_modules"][name]
    if name in state["_parameters"]:
        return state["_parameters"][name]
    if name in state["_buffers"]:
        return state["_buffers"][name]
    return getattr(module, name, None)
