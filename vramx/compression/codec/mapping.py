"""What may be packed in place of a tensor's elements: a function of them that loses less.

normalised.py, roots.py, angles.py and signs.py have the functions and say why. Where a kernel has
the function, packing is one pass and unpacking another; elsewhere tensor operations compute it
beside the codec. Decides nothing, no state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vramx.kernels.launch import Function


class Mapping(Protocol):
    """A function of elements, and how they are had back. Not written again once it is made."""

    @property
    def function(self) -> Function | None:
        """What the kernels know of the function; None where they do not have it."""

    def of(self, elements: Tensor) -> Tensor:
        """Return the numbers that are packed, float32 (or bool, of a format of masks)."""

    def back(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the elements; may write into the numbers."""
