"""Of a tensor whose backward asks only whether an element is above zero, a bit for each.

Another codec keeps the bits. Which operations ask for no more is exactness.py's. No state of its
own; a comparison of the tensor beside what the codec costs.
"""

from __future__ import annotations

import torch

from vramx.compression.config import Format
from vramx.compression.saved import Codec, Payload


class Signs:
    """Of a tensor, a bit for each element: above zero (or NaN), or not."""

    __slots__ = ("_dtype", "payload")

    def __init__(self, payload: Payload, dtype: torch.dtype) -> None:
        self.payload = payload
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes

    def values(self, bits: torch.Tensor) -> torch.Tensor:
        """Return 1 and 0, which compare with zero as the elements did."""
        return bits.to(self._dtype)


class SignCodec:
    """Keeps the signs of elements, with another codec for the bits."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(self, elements: torch.Tensor, format: Format) -> Payload:
        # Not above: a NaN is neither, and torch lets the gradient through it.
        return Signs(self._codec.encode(elements.le(0).logical_not_(), format), elements.dtype)

    def decode(self, payload: Signs) -> torch.Tensor:
        return payload.values(self._codec.decode(payload.payload))
