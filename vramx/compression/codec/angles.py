"""Results of tanh and sigmoid, packed so that the slope that backward makes of them is as good.

The slope of tanh is 1 - y**2. Where tanh saturates it vanishes, and the error of a packed y does
not: a step of y is one of the slope. So what is packed is the angle whose sine y is: the slope is
the cosine's square, and a step of the angle is less of it the nearer y is to 1. A sigmoid is the
square of a sine, and its slope the product of both squares. Angles are in quarter turns: those of 0
and 1 are exact numbers. Another codec keeps them. No state of its own; some elementwise operations
in float32 beside what the codec costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vramx.compression.policy.calls import Operation
from vramx.kernels.launch import Function

_QUARTER = math.pi / 2
_TANH, _SIGMOID = "TanhBackward0", "SigmoidBackward0"
# Of a sum of a rounded angle, that may be past a quarter turn by a step: the sine comes back there.
_TO_ANGLE: Mapping[str, Callable[[Tensor], Tensor]] = {
    _TANH: lambda y: y.asin(),
    _SIGMOID: lambda y: y.sqrt().asin(),
}
_KERNELS = {_TANH: "tanh", _SIGMOID: "sigmoid"}
_FROM_ANGLE: Mapping[str, Callable[[Tensor], Tensor]] = {
    _TANH: torch.sin,
    _SIGMOID: lambda angle: angle.sin().square(),
}


def function_of(tensor: Tensor, operation: Operation) -> str:
    """Return of which function a saved tensor is the result, by its node's name; empty if of none.

    Only where the operation itself has made it: an argument may have been written to since.

    Example:
        >>> y = torch.zeros(2, requires_grad=True).tanh()
        >>> function_of(y, Operation("tanh", (), {})), function_of(y, Operation("mul", (y, y), {}))
        ('TanhBackward0', '')
    """
    node = tensor.grad_fn
    name = "" if node is None else node.name()
    if name not in _TO_ANGLE:
        return ""
    own = operation.name in ("tanh", "sigmoid")  # in place it is an argument, too
    return name if own or operation.match(tensor) is None else ""


class Angle:
    """The angles, in quarter turns, of which a function's results are the sines, or squares."""

    __slots__ = ("_name", "function")

    def __init__(self, function: str) -> None:
        self._name = function
        self.function = Function(_KERNELS[function])

    def of(self, elements: Tensor) -> Tensor:
        return _TO_ANGLE[self._name](elements.float()) / _QUARTER

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return _FROM_ANGLE[self._name](numbers * _QUARTER).to(dtype)


ANGLES = {function: Angle(function) for function in _TO_ANGLE}
