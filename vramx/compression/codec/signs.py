"""Of a tensor whose backward asks only whether an element is above zero, a bit for each.

Which operations ask for no more is exactness.py's. No state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vramx.kernels.launch import Function


class Sign:
    """Whether an element is above zero, or NaN; and 1 and 0, which compare with zero as it did."""

    function = Function("sign")

    def of(self, elements: Tensor) -> Tensor:
        # Not above: a NaN is neither, and torch lets the gradient through it.
        return elements.le(0).logical_not_()

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers.to(dtype)


SIGN = Sign()
