"""What a program reads of tensors without data: item(), bool(), tolist(), numpy().

What is known (fake_values.py) is read. A float of which nothing is known is taken for 0.0, arrays
and lists of floats likewise. An integer that item() reads may count for a metric, or it may be a
size: an Unread is computed with, and printed, as a number is, and is an error that names the line
where a size, a comparison or an index is made of it. Other reads are that error at once.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from vramx.errors import UntraceableError
from vramx.planning.fake_values import forget_value, real, value_of

Assume = Callable[[str], None]
_FLOATS = "floats of the GPU that the step reads, as by item(), are taken for 0.0"
_COUNTS = "integers that the step reads and only computes with, as for a metric, are taken for 0"
_ARRAYS = "arrays that the step reads by numpy(){} are taken for zeros"


def read_value(tensor: Tensor, assume: Assume) -> Any:
    """Return what item() returns: a number that is known, or zero for a float.

    Raises:
        UntraceableError: it is an integer or a truth value, on which sizes and branches depend.
    """
    known = value_of(tensor)
    if known is not None:
        with real():
            return known.flatten()[0].item() if known.numel() else known.item()
    if tensor.is_floating_point():
        assume(_FLOATS)
        return 0.0
    if tensor.is_complex():
        assume(_FLOATS)
        return 0j
    raise _error(str(tensor.dtype).removeprefix("torch."))


def read_equal(operation: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return what torch.equal() or allclose() does: shapes differ, or it is the same memory.

    Raises:
        UntraceableError: it depends on the numbers, and these are not known.
    """
    one, other, *options = args
    if one.shape != other.shape and operation is EQUAL:
        return False
    same = one.shape == other.shape and one.stride() == other.stride()
    same = same and one.storage_offset() == other.storage_offset()
    if same and one.untyped_storage()._cdata == other.untyped_storage()._cdata:
        return True
    known = value_of(one), value_of(other)
    if known[0] is None or known[1] is None:
        raise _error("bool")
    with real():
        return bool(operation(*known, *options, **kwargs))


EQUAL = torch.ops.aten.equal.default
COMPARISONS = (EQUAL, torch.ops.aten.allclose.default)


def read(function: Any, args: Any, assume: Assume) -> Any:
    """Return what a call reads of a tensor without data, NotImplemented for other calls."""
    if function is Tensor.__format__ and isinstance(args[0], FakeTensor):
        return _formatted(*args)
    how = _READS.get(function)
    if how is None or not args or not isinstance(args[0], FakeTensor):
        return NotImplemented
    return how(args[0], assume)


def _formatted(tensor: Tensor, spec: str) -> str:
    """Return a number as a program writes it into its log, a zero where it is not known."""
    if tensor.dim():
        return object.__format__(tensor, spec)
    known = value_of(tensor)
    with real():
        if known is None:
            known = torch.zeros((), dtype=tensor.dtype, device="cpu")
        return format(known.flatten()[0].item(), spec)


def as_numbers(function: Any, args: Any) -> tuple[Any, bool]:
    """Return arguments of torch.tensor() with numbers for tensors in a list, and if all are known.

    Numbers that are not known are zeros.
    """
    if function not in (torch.tensor, torch.as_tensor) or not isinstance(args[0], (list, tuple)):
        return args, True
    if not any(isinstance(x, FakeTensor) for x in tree_leaves(args[0])):
        return args, True
    are_known = True

    def numbers(value: Any) -> Any:
        nonlocal are_known
        if not isinstance(value, FakeTensor):
            return value
        known = value_of(value)
        are_known = are_known and known is not None
        with real():
            if known is None:
                known = torch.zeros(value.shape, dtype=value.dtype)
            return known.tolist()

    return (tree_map(numbers, args[0]), *args[1:]), are_known


def _item(tensor: Tensor, assume: Assume) -> Any:
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    if tensor.numel() != 1 or value_of(tensor) is not None or tensor.dtype == torch.bool:
        return NotImplemented
    if not whole:
        return NotImplemented
    assume(_COUNTS)
    return Unread(str(tensor.dtype).removeprefix("torch."))


def _array(tensor: Tensor, assume: Assume) -> Any:
    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.dtype not in _NUMPY:
        return NotImplemented  # torch's own error
    known = value_of(tensor)
    if known is not None:
        with real():
            return known.clone().numpy()
    assume(_ARRAYS.format(_place()))
    return np.zeros(tuple(tensor.shape), _NUMPY[tensor.dtype])  # pages that nobody writes


def _list(tensor: Tensor, assume: Assume) -> Any:
    known = value_of(tensor)
    if known is not None:
        with real():
            return known.tolist()
    if not tensor.is_floating_point():
        raise _error(str(tensor.dtype).removeprefix("torch."))
    assume(_FLOATS)
    return np.zeros(tuple(tensor.shape)).tolist()


_NUMPY: dict[torch.dtype, Any] = {
    getattr(torch, name): np.dtype(name)
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
} | {torch.bool: np.dtype(bool), torch.complex64: np.dtype("complex64")}
_READS: dict[Any, Callable[[Tensor, Assume], Any]] = {
    Tensor.item: _item,
    Tensor.tolist: _list,
    Tensor.numpy: _array,
    Tensor.__array__: _array,
}


def _beside(operation: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Return what Unread has for an operator, by what it does to the other operand and a number."""

    def result(self: Unread, other: Any = None, *_: Any) -> Any:
        if not isinstance(other, FakeTensor):
            return self
        made = operation(other, 1)
        forget_value(made)
        return made

    return result


class Unread:
    """An integer whose value is not known: a number to compute with, and nothing to decide by.

    A tensor stays a tensor beside it, of which no value is known.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def _refuse(self, *_: Any) -> Any:
        raise _error(self._kind)

    def __rtruediv__(self, other: Any) -> Any:
        return (
            _beside(operator.truediv)(self, other) if isinstance(other, Tensor) else self._refuse()
        )

    def __float__(self) -> float:
        return 0.0

    def __str__(self) -> str:
        return "0"

    def __format__(self, spec: str) -> str:
        return format(0, spec)

    __repr__ = __str__
    __add__ = __radd__ = __sub__ = __rsub__ = _beside(operator.add)
    __mul__ = __rmul__ = __neg__ = __pos__ = __abs__ = __round__ = _beside(operator.mul)
    __truediv__ = __floordiv__ = __mod__ = __pow__ = _beside(lambda other, number: number / other)
    __int__ = __index__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __rfloordiv__ = __rmod__ = __rpow__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _error(kind: str) -> UntraceableError:
    # Of a comparison with a loss, as for a step that is to be left out.
    instead = "," if kind != "bool" else ", compare item() of a float, which is taken for 0.0,"
    return UntraceableError(
        f"the step reads a value of {kind} that depends on data, by item(), int(), bool() or an "
        f"if{_place()}; compute it before the step{instead} or have predict run without it"
    )


def _place() -> str:
    """Return the line of the program that asks, of what is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "/vramx/planning/" not in frame.filename:
            return f" ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    return ""
