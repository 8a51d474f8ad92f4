"""Arguments of powers, packed as roots: the product that backward makes of them spans more decades.

The slope of a square is 2 x. Where a power is taken of a power, most of a group are next to nothing
beside its largest, and gradients may come from these (a logarithm follows, or a norm). A step of
the root is less of x the smaller x is. With values spread as a normal distribution's the error is
an eighth larger than a step of x itself would make it.

Another codec keeps the roots; some elementwise operations in float32 beside what that costs. No
state of its own. Rounded stochastically a square is a quarter of a root's step squared above what
it was at the most: of 127 steps to the largest, 2**-16 of that.
"""

from __future__ import annotations

import torch

from vramx.compression.config import Format
from vramx.compression.saved import Codec, Payload

# Operations that multiply their one tensor by itself.
POWERS = frozenset({"square", "pow"})


class Roots:
    """The packed roots, with the signs of what they are of."""

    __slots__ = ("dtype", "payload")

    def __init__(self, payload: Payload, dtype: torch.dtype) -> None:
        self.payload = payload
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes


class RootCodec:
    """Keeps numbers as the roots of their magnitudes, with another codec for these."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(self, elements: torch.Tensor, format: Format) -> Payload:
        roots = elements.float().abs().sqrt_().copysign_(elements)
        return Roots(self._codec.encode(roots, format), elements.dtype)

    def decode(self, payload: Roots) -> torch.Tensor:
        roots = self._codec.decode(payload.payload)
        return (roots * roots.abs()).to(payload.dtype)
