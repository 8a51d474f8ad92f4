"""What the tests of batch, group and instance norm share: inputs, ours and torch's by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from norm_tools import sample
from torch import Tensor

from vramx.nn.functional import ChannelNormed, batch_norm, group_norm, instance_norm

SHAPE = (4, 6, 5, 5)
KINDS = ("batch", "group", "instance")
Function = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Function] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_activation = pytest.mark.parametrize("word", ACTIVATIONS)
every_order = pytest.mark.parametrize(
    "order", [torch.contiguous_format, torch.channels_last], ids=["first", "last"]
)


def image(
    seed: int,
    shape: tuple[int, ...] = SHAPE,
    order: torch.memory_format = torch.contiguous_format,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    return sample(*shape, seed=seed, dtype=dtype).detach().to(memory_format=order).requires_grad_()


def affine_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return sample(shape[1], seed=2, dtype=dtype), sample(shape[1], seed=3, dtype=dtype)


def groups_of(x: Tensor) -> int:
    """Groups of three channels, where they divide all."""
    return x.shape[1] // 3 if x.shape[1] % 3 == 0 else 4


def ours(kind: str, x: Tensor, affine: tuple[Tensor, Tensor], **options: object) -> ChannelNormed:
    if kind == "batch":
        return batch_norm(x, None, None, *affine, training=True, **options)  # type: ignore[arg-type]
    if kind == "group":
        return group_norm(x, groups_of(x), *affine, **options)  # type: ignore[arg-type]
    return instance_norm(x, *affine, **options)  # type: ignore[arg-type]


def torchs(kind: str, x: Tensor, affine: tuple[Tensor, Tensor]) -> Tensor:
    if kind == "batch":
        return functional.batch_norm(x, None, None, *affine, training=True)
    if kind == "group":
        return functional.group_norm(x, groups_of(x), *affine)
    return functional.instance_norm(x, weight=affine[0], bias=affine[1])


def close(found: Tensor, expected: Tensor) -> bool:
    """Terms are of order 1 and sums of some hundred of them; float64 has 2**-53."""
    return torch.allclose(found, expected, rtol=1e-12, atol=1e-11)
