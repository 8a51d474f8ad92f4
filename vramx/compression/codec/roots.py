"""Arguments of powers, packed as roots: the product that backward makes of them spans more decades.

The slope of a square is 2 x, however it is written. Most of a group may be next to nothing beside
its largest, and gradients may come from these (a logarithm follows, or a norm). A step of the root
is less of x the smaller x is. With values spread as a normal distribution's the error is an eighth
larger than a step of x itself would make it. The argument of a power of a power spans more decades
than its roots do: policy.py keeps it.

A product of matrices that is a factor of another is packed so as well, as the keys times values of
linear attention are: a row of it has the sum of the keys, which is far above the others, and what
is left of both in a gradient is small. With rectified features in heads of 16, a gradient has a
cosine below 0.99 with the exact one without roots, and above 0.999 with them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vramx.compression.policy.calls import Operation
from vramx.kernels.launch import Function

# Operations that multiply their one tensor by itself, and those whose two tensors may be one.
POWERS = frozenset({"square", "pow"})
_PRODUCTS = frozenset({"mul", "multiply", "addcmul"})
_EINSUM = "einsum"
MAYBE_POWERS = POWERS | _PRODUCTS | {_EINSUM}
# Products of matrices, whose factors may be such products.
SUMMED = frozenset({"matmul", "bmm", _EINSUM})
_SUMS = frozenset({"BmmBackward0", "BaddbmmBackward0"})
# Functions of which two may be taken from one another: the chance of what lies between.
SLOPES = frozenset({"sigmoid", "tanh", "pow"})
# Nodes of one argument, and of sums and products with numbers, through which decades are the same.
_SCALED = frozenset(
    f"{name}Backward0"
    for name in (
        *("Mul", "Div", "Neg", "Add", "Sub", "Rsub", "View", "UnsafeView", "ReshapeAlias"),
        *("T", "Transpose", "Permute", "ToCopy", "Clone", "Select"),
        *("Unsqueeze", "Squeeze", "Expand", "Slice"),
    )
) | {"RsubBackward1"}  # of a number
_EXPONENTIALS = frozenset({"ExpBackward0", "Exp2Backward0", "Expm1Backward0"})
# Of chances: what multiplies them is taken from others of the same size in a gradient.
_LOG_SOFTMAX = "LogSoftmaxBackward0"
_LOGARITHMS = frozenset(
    f"{name}Backward0" for name in ("Log", "Log2", "Log10", "Log1P", "LogSigmoid")
) | {_LOG_SOFTMAX}
_CLAMPS = frozenset({"ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0"})
_DECADES = _EXPONENTIALS | {"ReciprocalBackward0", "RsqrtBackward0"}
_SPANNING = _DECADES | _LOGARITHMS
_DIFFERENCE = "SubBackward0"
_EXACT_BESIDE = _EXPONENTIALS | _LOGARITHMS
_MAY_INVERT = frozenset({"PowBackward0", "DivBackward0"})
_WALK = 8
_SQUARE = 2
# Through a polynomial that stands for the normal distribution's integral to its argument's scale.
_WALK_OF_SLOPES = 5


def is_power(operation: Operation) -> bool:
    """Tell whether an operation multiplies a tensor by itself.

    Example:
        >>> x = torch.ones(2)
        >>> [is_power(Operation("mul", args, {})) for args in ((x, x), (x, x + 1))]
        [True, False]
        >>> is_power(Operation("einsum", ("i,i->", x, x), {}))
        True
    """
    if operation.name in POWERS:
        return True
    if operation.name not in MAYBE_POWERS:
        return False
    factors = operation.tensors[-2:]  # of addcmul the first is no factor
    if operation.name == _EINSUM:
        factors = operation.tensors
    return len({id(each) for each in factors}) < len(factors)


def is_product(operation: Operation) -> bool:
    """Tell whether an operation multiplies elements by elements, and adds none of them up.

    Example:
        >>> x = torch.ones(2, 2)
        >>> [is_product(Operation("einsum", (how, x, x), {})) for how in ("ij,ij->ij", "ij,jk->ik")]
        [True, False]
    """
    if operation.name == _EINSUM:
        return _adds_nothing(operation.option(0, "equation", None))
    return operation.name in _PRODUCTS or operation.name in POWERS


@lru_cache(maxsize=256)
def _adds_nothing(equation: Any) -> bool:
    """Tell whether an equation of einsum sums over no index; what is no text may not."""
    if not isinstance(equation, str):
        return True
    given, arrow, result = equation.replace(" ", "").partition("->")
    letters = [letter for letter in given if letter.isalpha()]
    if not arrow:
        return len(set(letters)) == len(letters)
    return set(letters) <= set(result)


def comes_of_power(tensor: Tensor) -> bool:
    """Tell whether a tensor is a power, or a multiple of one.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> comes_of_power(1 + 2 * x**2), comes_of_power(3 * x * x), comes_of_power(3 * x)
        (True, False, False)
    """
    node: Any = tensor.grad_fn
    for _ in range(_WALK):
        if node is None:
            return False
        name, before = node.name(), [each for each, _ in node.next_functions if each is not None]
        if name == "PowBackward0" or (name == "MulBackward0" and before[1:] == before[:1]):
            return True
        if name not in _SCALED or len(before) != 1:
            return False
        node = before[0]
    return False


def is_of_products(tensor: Tensor, operation: Operation) -> bool:
    """Tell whether a factor of a product of matrices is itself one, or a multiple of one.

    Example:
        >>> x, y = torch.ones(2, 3, 3, requires_grad=True), torch.ones(2, 3, 3)
        >>> [is_of_products(z, Operation("matmul", (z, y), {})) for z in (2 * (x @ y), 2 * x)]
        [True, False]
    """
    if operation.name not in SUMMED or operation.custom:
        return False
    node: Any = tensor.grad_fn
    for _ in range(_WALK):
        name = "" if node is None else node.name()
        if name not in _SCALED:
            return name in _SUMS
        node = node.next_functions[0][0]
    return False


def multiplies_decades(tensor: Tensor, operation: Operation) -> bool:
    """Tell whether the other factor of a product spans decades, as an exponential does.

    It is large where this factor is small beside its group: a step of that is multiplied by it. A
    reciprocal does where it changes within a group, as of columns that a program normalises by
    hand; that of a whole row does not. Of a product of matrices either factor counts: where an
    exponential is small, what Sinkhorn's iterations multiply it by is large, and the other way
    round. So are the chances that a divergence multiplies by logarithms of others: where these are
    nearly as large, the gradient is what is left of both. is_logarithm() tells of these.

    Example:
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> others = 2 * x.exp(), x + 1, 3 / x.mean(0), 3 / x.mean(1, True), 1 - x.log()
        >>> [multiplies_decades(x, Operation("mul", (x, y), {})) for y in others]
        [True, False, True, False, True]
    """
    if operation.name in POWERS or operation.name not in MAYBE_POWERS | SUMMED:
        return False
    if not is_product(operation):
        found = (_decades_of(each, alone=True) for each in operation.tensors)
        return any(name in _EXACT_BESIDE for name in found)
    for other in operation.tensors:
        name = "" if other is tensor else _decades_of(other)
        if name in _EXACT_BESIDE or (name and _changes_in_groups(other, tensor)):
            return True
    return False


def is_logarithm(tensor: Tensor, operation: Operation) -> bool:
    """Tell whether a factor is the logarithm of chances, of which an entropy is made.

    Where chances are nearly even, as those of a policy at the start, logarithms are next to each
    other, and the gradient is what they differ by: packed ones gave it a cosine of 0.4.

    Example:
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> others = x.log(), -x.log2().clamp(min=-9), x - x.logsumexp(1, True), x.log() - x
        >>> [is_logarithm(y, Operation("mul", (x, y), {})) for y in others]
        [True, True, True, False]
    """
    if operation.name in POWERS or operation.name not in MAYBE_POWERS | SUMMED:
        return False
    return _decades_of(tensor, alone=True) in _LOGARITHMS


def is_of_decades(operation: Operation) -> bool:
    """Tell whether a sigmoid or a tanh is of a multiple of what spans decades, as an exponential;
    or of data less what a model makes of it.

    So are those of a bin's two ends, whose difference is the chance of what lies between: slopes
    that are nearly equal are divided by it, and the gradient is what is left of both. In mixtures
    of discretised logistics it had a cosine of 0.2 with the exact one, from packed results. The
    cube in a polynomial that stands for the normal distribution's integral is of such, too.

    Example:
        >>> x, scale = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> ends = scale.exp() * (x - 1), (x + 1) / scale, 3 * (x + 1)
        >>> [is_of_decades(Operation("sigmoid", (end,), {})) for end in ends]
        [True, True, False]
        >>> is_of_decades(Operation("sigmoid", (3 * (torch.ones(2) - x),), {}))
        True
        >>> [is_of_decades(Operation("pow", (ends[0], power), {})) for power in (2, 3)]
        [False, True]
    """
    exponent = operation.option(1, "exponent", 2) if operation.name in POWERS else None
    if isinstance(exponent, (int, float)) and exponent <= _SQUARE:
        return False
    front: list[Any] = [each.grad_fn for each in operation.tensors]
    for _ in range(_WALK_OF_SLOPES):
        below: list[Any] = []
        for node in front:
            name = type(node).__name__
            if name in _DECADES or (name in _MAY_INVERT and _inverts(node)):
                return True
            if name == _DIFFERENCE and _is_of_data(node):
                return True
            if name in _SCALED or name == "PowBackward0":
                below += [each for each, _ in node.next_functions if each is not None]
        front = below
    return False


def _decades_of(tensor: Tensor, *, alone: bool = False) -> str:
    """Return the name of the node that makes a tensor span decades, empty where none does.

    With `alone` only numbers, and tensors without a gradient, have been added or multiplied since:
    not of a state that decays, to which something comes in each step.
    """
    node: Any = tensor.grad_fn
    for _ in range(_WALK):
        name = "" if node is None else node.name()
        if name == _DIFFERENCE and _is_log_softmax(node):
            return _LOG_SOFTMAX
        if name in _SPANNING or (name in _MAY_INVERT and _inverts(node)):
            return name
        if name not in _SCALED and name not in _CLAMPS:
            return ""
        before = [each for each, _ in node.next_functions if each is not None]
        if not before or (alone and len(before) > 1):
            return ""
        node = before[0]
    return ""


def _is_of_data(node: Any) -> bool:
    """Tell whether a difference is what is left of a tensor without a gradient."""
    (data, _), (other, _) = node.next_functions
    return data is None and other is not None


def _is_log_softmax(node: Any) -> bool:
    """Tell whether a difference is written as log-softmax: scores less their logsumexp."""
    node = node.next_functions[1][0]
    while node is not None and node.name() in _SCALED:
        node = node.next_functions[0][0]
    return node is not None and bool(node.name() == "LogsumexpBackward0")


def _inverts(node: Any) -> bool:
    """Tell whether a power is a negative one, or a quotient divides by a tensor."""
    if node.name() == "PowBackward0":
        return bool(node._saved_exponent.real < 0)
    return node.next_functions[1][0] is not None


def _changes_in_groups(other: Tensor, tensor: Tensor) -> bool:
    """Tell whether a factor changes along the dimension in which a tensor is packed in groups."""
    dims = range(-tensor.dim(), 0)
    at = min(dims, key=lambda d: (tensor.shape[d] < 2, tensor.stride(d)), default=0)
    return -other.dim() <= at < 0 and other.shape[at] > 1 and other.stride(at) > 0


def is_of_data(tensor: Tensor) -> bool:
    """Tell whether a tensor is data less what a model makes of it, and numbers at the most.

    So is what a scale multiplies of the ends of a bin: is_of_decades() has the rest.

    Example:
        >>> x, mean = torch.ones(2), torch.ones(2, requires_grad=True)
        >>> is_of_data(x - mean + 1), is_of_data(1 - mean)
        (True, False)
    """
    node: Any = tensor.grad_fn
    for _ in range(_WALK):
        name = "" if node is None else node.name()
        if name == _DIFFERENCE and _is_of_data(node):
            return True
        before = [] if name not in _SCALED else [n for n, _ in node.next_functions if n is not None]
        if len(before) != 1:
            return False
        node = before[0]
    return False


def graph_of_factor(tensor: Tensor, operation: Operation) -> tuple[bool, bool, bool, bool]:
    """Return whether a factor is the power of a power, whether one of decades multiplies it, and
    whether it is a logarithm, or another's and of data."""
    of_power = is_power(operation) and comes_of_power(tensor)
    of_data = operation.name in _PRODUCTS and not is_power(operation) and is_of_data(tensor)
    decades, logarithm = multiplies_decades(tensor, operation), is_logarithm(tensor, operation)
    return of_power, decades, logarithm, of_data


class Root:
    """The roots of magnitudes, with the signs of what they are of."""

    function = Function("root")

    def of(self, elements: Tensor) -> Tensor:
        return elements.float().abs().sqrt_().copysign_(elements)

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.abs().mul_(numbers).to(dtype)


class RootOfMost:
    """The same of magnitudes up to 4; beyond, halves: what is kept as an outlier is not squared."""

    def of(self, elements: Tensor) -> Tensor:
        magnitudes = elements.float().abs()
        numbers = magnitudes.sqrt()
        return torch.maximum(numbers, magnitudes.mul_(0.5), out=numbers).copysign_(elements)

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.abs().clamp_(max=2).mul_(numbers).to(dtype)


ROOT = Root()
ROOT_OF_MOST = RootOfMost()
