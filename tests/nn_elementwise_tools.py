"""What the tests of vramx.nn's elementwise functions share: comparisons, bounds, and what is kept.

Tolerances. In float32 a kernel and the composite compute the same formula with other functions for
exp, erf and division: each is right to a few units of 2**-24, and so is the result, relative to the
largest value that enters a sum. CLOSE allows 2**-20, sixteen units. In bfloat16 Triton's
interpreter cuts where a GPU rounds: a result differs by one unit, 2**-7 of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from norm_tools import EXACT
from torch import Tensor

from vramx.compression.config import Compression

CLOSE = 2.0**-20
UNIT_OF_BFLOAT16 = 2.0**-7
FORMATS = {
    "int8": Compression(),
    "int8 asymmetric": Compression(symmetric=False),
    "int8 nearest": Compression(rounding="nearest"),
    "int4": Compression(level="int4"),
    "int4 symmetric nearest": Compression(level="int4", symmetric=True, rounding="nearest"),
    "groups of 32": Compression(group_size=32),
    "exact": EXACT,
}
SHAPES = [(33, 128), (5, 80), (1, 1, 5, 77), (3,)]


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, some of them large."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    x.view(-1)[::37] *= 8
    return x.to(dtype)


def differs(a: Tensor, b: Tensor, tolerance: float = CLOSE) -> float:
    """Return the largest difference, in tolerances of the largest value; above 1 they differ."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert not a.isnan().any()
    largest = b.double().abs().max().clamp(min=2.0**-100)
    return float((a.double() - b.double()).abs().max() / largest / tolerance)


def differs_in_places(a: Tensor, b: Tensor, tolerance: float) -> float:
    """As differs(), each element relative to itself."""
    assert not a.isnan().any()
    bound = b.double().abs() * tolerance + 2.0**-60
    return float(((a.double() - b.double()).abs() / bound).max())


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def saved_by(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what autograd saves while a function runs, but for the inputs' memory and probes."""
    saved: list[Tensor] = []

    def watch(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(watch, lambda tensor: tensor):
        result = function(*inputs)
    assert result.requires_grad
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return [
        tensor
        for tensor in saved
        if tensor.untyped_storage().data_ptr() not in own
        and 0 < tensor.nbytes <= tensor.untyped_storage().nbytes()
    ]


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], incoming: Tensor
) -> list[Tensor]:
    """Return the gradients of fresh leaves with the inputs' values."""
    fresh = leaves(*inputs)
    return list(torch.autograd.grad(function(*fresh), fresh, incoming))
