"""Arguments of functions whose slopes stop changing, packed no farther than to where they do.

The slope of gelu is 0 below -6 and 1 above 6 to the precision of float32, however far. Arguments
far beyond, as of channels that are dead, would give their group a step that is a large part of the
range in which slopes do change. So what is packed has at most the magnitude at which they do not,
and so much below the largest of its group as makes a slope nothing beside that one's: where all of
a group lies in the tail, the tail is kept.

What is packed stands for the argument in this use alone: another operation that reads the same
memory packs it again. A gated unit's gate is another matter: its slope is multiplied by the other
half, and vanishes on both sides; exactness.py keeps it. No state.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vramx.compression.policy.calls import Operation
from vramx.kernels.launch import Function

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
        largest = groups.amax(1, keepdim=True)
        high = torch.where(largest == torch.inf, largest, float(self._bound))
        low = largest.clamp(max=0) - self._bound
        return groups.clamp(low, high).view(-1)[: elements.numel()]

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.to(dtype)
