"""What the tests of the norms and of the Linears share: gradients, bounds, bytes that are held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from vramx.compression.config import Compression
from vramx.nn.functional import layer_norm, rms_norm
from vramx.nn.norm import Normed

EXACT = Compression(level="keep")
INT8 = Compression()
NEAREST = Compression(rounding="nearest")
INT4 = Compression(level="int4")
# A step of int8 is at most this part of the greatest magnitude of its group (codec.py).
INT8_STEP = 1.0079 / 126


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(function: Any, inputs: Sequence[Tensor], seed: int = 9) -> tuple[Tensor, ...]:
    """Return the gradients of a random weighting of all outputs."""
    outputs = function()
    weights = [sample(*o.shape, seed=seed + i, dtype=o.dtype) for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, [weight.detach() for weight in weights])


def norm_of(
    kind: str,
    x: Tensor,
    affine: Sequence[Tensor | None] = (None, None),
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Normed:
    if kind == "rms":
        return rms_norm(x, affine[0], 1e-5, residual, keep)
    return layer_norm(x, *affine, 1e-5, residual, keep)


def torchs_norm(kind: str, x: Tensor, affine: Sequence[Tensor | None]) -> Tensor:
    if kind == "rms":
        return functional.rms_norm(x, x.shape[-1:], affine[0], 1e-5)
    return functional.layer_norm(x, x.shape[-1:], *affine, 1e-5)


def held_bytes(function: Callable[[], object], *apart: Tensor) -> int:
    """Return the bytes that autograd holds of what a function made: each storage once, whole."""
    known = {tensor.untyped_storage().data_ptr() for tensor in apart}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept_alive = function()
    del kept_alive
    return sum(storages.values())


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference, relative to what is expected."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()


def step_of(x: Tensor, group_size: int = 128) -> Tensor:
    """Return how far an element of an int8 pack may be from x's: a step of its group."""
    flat = x.detach().double().reshape(-1)
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % group_size)).view(-1, group_size)
    steps = (INT8_STEP * groups.abs().amax(1, keepdim=True)).expand_as(groups)
    return steps.reshape(-1)[: flat.numel()].view(x.shape)
