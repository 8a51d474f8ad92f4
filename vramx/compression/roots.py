"""Arguments of powers, packed as roots: the product that backward makes of them spans more decades.

The slope of a square is 2 x. Where a power is taken of a power, most of a group are next to nothing
beside its largest, and gradients may come from these (a logarithm follows, or a norm). A step of
the root is less of x the smaller x is. With values spread as a normal distribution's the error is
an eighth larger than a step of x itself would make it.

No state. Rounded stochastically a square is a quarter of a root's step squared above what it was at
the most: of 127 steps to the largest, 2**-16 of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vramx.kernels.launch import Function

# Operations that multiply their one tensor by itself.
POWERS = frozenset({"square", "pow"})


class Root:
    """The roots of magnitudes, with the signs of what they are of."""

    function = Function("root")

    def of(self, elements: Tensor) -> Tensor:
        return elements.float().abs().sqrt_().copysign_(elements)

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return (numbers * numbers.abs()).to(dtype)


ROOT = Root()
