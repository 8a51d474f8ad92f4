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

from vramx.compression.calls import Operation
from vramx.compression.config import Format
from vramx.compression.saved import Codec, Payload

_QUARTER = math.pi / 2
_TANH, _SIGMOID = "TanhBackward0", "SigmoidBackward0"
# Of a sum of a rounded angle, that may be past a quarter turn by a step: the sine comes back there.
_TO_ANGLE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    _TANH: lambda y: y.asin(),
    _SIGMOID: lambda y: y.sqrt().asin(),
}
_FROM_ANGLE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    _TANH: torch.sin,
    _SIGMOID: lambda angle: angle.sin().square(),
}


def function_of(tensor: torch.Tensor, operation: Operation) -> str:
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


class Angles:
    """The packed angles, and what they are of."""

    __slots__ = ("dtype", "function", "payload")

    def __init__(self, payload: Payload, function: str, dtype: torch.dtype) -> None:
        self.payload = payload
        self.function = function
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes


class AngleCodec:
    """Keeps results of a function as angles, with another codec for these."""

    def __init__(self, codec: Codec, function: str) -> None:
        self._codec = codec
        self._function = function

    def encode(self, elements: torch.Tensor, format: Format) -> Payload:
        turns = _TO_ANGLE[self._function](elements.float()) / _QUARTER
        return Angles(self._codec.encode(turns, format), self._function, elements.dtype)

    def decode(self, payload: Angles) -> torch.Tensor:
        turns = self._codec.decode(payload.payload)
        return _FROM_ANGLE[payload.function](turns * _QUARTER).to(payload.dtype)
