"""What may be packed in place of a tensor's elements: a function of them that loses less.

The functions for arguments and results of activations are here, those of norms in normalised.py,
of powers in roots.py. Where a kernel has the function, packing is one pass and unpacking another;
elsewhere tensor operations compute it beside the codec. What is packed stands for the elements in
this use alone: another operation that reads the same memory packs it again. No state.

A sign. Of a tensor whose backward asks only whether an element is above zero there is a bit for
each. Which operations ask for no more is exactness.py's.

Results of tanh and sigmoid. The slope of tanh is 1 - y**2. Where tanh saturates it vanishes, and
the error of a packed y does not: a step of y is one of the slope. What divides by the slope, as the
logarithm of a chance does, and of the density of a squashed distribution, makes it up again. So at
8 bits what is packed is the root of how often a y's distance from the end that it is next to has
been halved: a step is a part of that distance, and so of the slope, however small they are, and of
y itself in the middle. Logarithms are those that float32's bits are, right at powers of two and
linear between: which function it is, is no matter where the way back is exact. With 4 bits the
middle would have too coarse steps: there it is the angle whose sine y is. The slope is the cosine's
square, and a step of the angle is less of it the nearer y is to 1. A sigmoid is the square of a
sine, and its slope the product of both squares. Angles are in quarter turns: those of 0 and 1 are
exact numbers.

Arguments of functions whose slopes stop changing. The slope of gelu is 0 below -6 and 1 above 6 to
the precision of float32, however far. Arguments far beyond, as of channels that are dead, would
give their group a step that is a large part of the range in which slopes do change. So what is
packed has at most the magnitude at which they do not, and so much below the largest of its group as
makes a slope nothing beside that one's: where all of a group lies in the tail, the tail is kept. A
gated unit's gate is another matter: its slope is multiplied by the other half, and vanishes on both
sides; exactness.py keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vramx.compression.fakes import PLAIN
from vramx.compression.policy.calls import Operation
from vramx.kernels.launch import Function

Elementwise = Callable[[Tensor], Tensor]


class Mapping(Protocol):
    """A function of elements, and how they are had back. Not written again once it is made."""

    @property
    def function(self) -> Function | None:
        """What the kernels know of the function; None where they do not have it."""

    def of(self, elements: Tensor) -> Tensor:
        """Return the numbers that are packed, float32 (or bool, of a format of masks)."""

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the elements; may write into the numbers."""


class Sign:
    """Whether an element is above zero, or NaN; and 1 and 0, which compare with zero as it did."""

    function = Function("sign")

    def of(self, elements: Tensor) -> Tensor:
        # Not above: a NaN is neither, and torch lets the gradient through it.
        return elements.le(0).logical_not_()

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.to(dtype)


SIGN = Sign()


class Slope:
    """Numbers that stand for a function's results, of which a step is a part of its slope."""

    __slots__ = ("_back", "_of", "function")

    def __init__(self, kernel: str, of: Elementwise, back: Elementwise) -> None:
        self.function = Function(kernel)
        self._of = of
        self._back = back

    def of(self, elements: Tensor) -> Tensor:
        return self._of(elements.float())

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return self._back(numbers).to(dtype)


_QUARTER = math.pi / 2
# Less than this is nothing beside 1, in float32, by more than a step that it may be off by.
_NOTHING = 2.0**-27
_ONE, _EXPONENT = 0x3F800000, 1 << 23  # float32's bits: those of 1, and what halving takes off
_LEAST = 2 * _EXPONENT  # bits of what may stand for 0


def _number_of_end(distance: Tensor) -> Tensor:
    halvings = (_ONE - distance.view(torch.int32)).float() / _EXPONENT
    return 2 * halvings.sqrt_() - 1


def _end_of_number(size: Tensor) -> Tensor:
    root = size / 2 + 0.5
    bits = _ONE - (root * root * _EXPONENT).to(torch.int32)
    return torch.where(bits < _LEAST, 0, bits).view(torch.float32)


def _number_of_tanh(y: Tensor) -> Tensor:
    size = y.abs()
    end = _number_of_end((1 - size).clamp_(min=_NOTHING))
    return torch.where(size < 0.5, 2 * size, end).copysign_(y)


def _tanh_of_number(number: Tensor) -> Tensor:
    size = number.abs()
    return torch.where(size >= 1, 1 - _end_of_number(size), size / 2).copysign_(number)


def _number_of_sigmoid(y: Tensor) -> Tensor:
    distance = torch.where(y < 0.5, y, (1 - y).clamp_(min=_NOTHING))
    middle = 2 - 4 * distance
    return torch.where(distance > 0.25, middle, _number_of_end(2 * distance)).copysign_(y - 0.5)


def _sigmoid_of_number(number: Tensor) -> Tensor:
    size = number.abs()
    distance = torch.where(size >= 1, _end_of_number(size) / 2, 0.5 - size / 4)
    return torch.where(number < 0, distance, 1 - distance)


# By nodes, with 4 bits and with 8. A rounded angle may be past a quarter turn by a step: the sine
# comes back there.
ANGLES = {
    "TanhBackward0": Slope(
        "tanh", lambda y: y.asin() / _QUARTER, lambda angle: (angle * _QUARTER).sin()
    ),
    "SigmoidBackward0": Slope(
        "sigmoid",
        lambda y: y.sqrt().asin() / _QUARTER,
        lambda angle: (angle * _QUARTER).sin().square(),
    ),
}
ENDS = {
    "TanhBackward0": Slope("ends of tanh", _number_of_tanh, _tanh_of_number),
    "SigmoidBackward0": Slope("ends of sigmoid", _number_of_sigmoid, _sigmoid_of_number),
}


def is_angle(value: Any) -> bool:
    """Tell whether a tensor is a result of tanh or sigmoid, or a view of one.

    Example:
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> is_angle(x.tanh()[0]), is_angle(x), is_angle(1)
        (True, False, False)
    """
    if type(value) not in PLAIN:
        return False
    base = value._base
    return type((value if base is None else base).grad_fn).__name__ in ANGLES


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
    if name not in ANGLES:
        return ""
    own = operation.name in ("tanh", "sigmoid")  # in place it is an argument, too
    return name if own or operation.match(tensor) is None else ""


# Where less than half of float32's rounding is left of a slope of 1, and where from any argument
# below zero on the slope has fallen by as much: x phi(x) for gelu, and exp(x) for others, with a
# factor of x or none.
_BOUNDS = {"gelu": 6, "silu": 20, "mish": 20, "softplus": 20, "elu": 20, "celu": 20}
BOUNDED = frozenset(_BOUNDS)
# Nodes of elu in place, which saves its result: the slope is that and 1, which cancel.
_RESULTS = frozenset({"EluBackward1", "CeluBackward1"})


def bound_of(operation: Operation) -> int:
    """Return beyond which magnitude an operation's argument does not change its slope; 0: none.

    Example:
        >>> bound_of(Operation("gelu", (), {})), bound_of(Operation("mul", (), {}))
        (6, 0)
        >>> bound_of(Operation("softplus", (torch.ones(1), 0.01), {}))  # it changes up to 2000
        0
    """
    bound = _BOUNDS.get(operation.name, 0)
    return 0 if not bound or operation.custom or operation.needs_exact else bound


def is_result(tensor: Tensor) -> bool:
    """Tell whether a tensor is what an activation has written over its argument."""
    node = tensor.grad_fn
    return node is not None and node.name() in _RESULTS


class Within:
    """The arguments in groups of a size, within a bound; NaN and infinity stay what they are."""

    __slots__ = ("_bound", "_group", "function")

    def __init__(self, bound: int, group_size: int) -> None:
        self._bound = bound
        self._group = group_size
        self.function = Function(f"within {bound}")

    def of(self, elements: Tensor) -> Tensor:
        short = -elements.numel() % self._group
        groups = elements.float()
        if short:
            groups = functional.pad(groups, (0, short), value=-torch.inf)
        groups = groups.view(-1, self._group)
        # Of what is no NaN, which stays one: the bounds are the others'.
        largest = torch.where(groups.isnan(), -torch.inf, groups).amax(1, keepdim=True)
        high = torch.where(largest == torch.inf, largest, float(self._bound))
        low = largest.clamp(max=0) - self._bound
        return groups.clamp(low, high).view(-1)[: elements.numel()]

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.to(dtype)
