"""The kernels of vramx.nn that benchmarks/kernels.py measures, at the widths of a Llama's block.

Each maker returns a launch on memory of its own and the tensors that it reads and writes, which is
what it has to move. What a kernel reads again (a row of logits) or hardly at all (weights of a
norm, positions of a rotary embedding) is not counted. bfloat16, packs of 8 bits in groups of 128,
stochastic rounding unless the name says nearest. Nothing is launched here; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vramx.kernels import (
    cross_entropy_launch,
    elementwise_launch,
    norm_backward_launch,
    norm_launch,
    rotary_launch,
)
from vramx.kernels.layout import Layout

HIDDEN = 4096
HEADS, HEAD_SIZE, TOKENS = 32, 128, 4096
CLASSES = 128_256  # Llama 3's vocabulary
GROUP = 128
DROPPED = 6554  # of 65536: a probability of 0.1
_EPS = 1e-6


class Launch(NamedTuple):
    """A call, and what it moves."""

    call: Callable[[], object]
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]

    @property
    def bytes_moved(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.read, *self.written))


Maker = Callable[[int, str], Launch]  # of the bytes of one bfloat16 tensor, and the device


def rows_of(size: int, device: str, columns: int = HIDDEN) -> Tensor:
    """Return normal bfloat16 [rows, columns] of about so many bytes."""
    return torch.randn(max(1, size // 2 // columns), columns, dtype=torch.bfloat16, device=device)


def layout_of(x: Tensor) -> Layout:
    return Layout(x.numel(), 8, GROUP, True)


def pack_for(x: Tensor) -> Tensor:
    """Return memory for a pack: codes of 1 and scales near 1e-38, which decode to numbers."""
    return torch.ones(layout_of(x).buffer_bytes, dtype=torch.uint8, device=x.device)


def noise_on(x: Tensor, is_stochastic: bool) -> Tensor | None:
    return torch.zeros(2, dtype=torch.int64, device=x.device) if is_stochastic else None


def normed_pack(x: Tensor) -> norm_launch.Kept:
    rstd = torch.ones(len(x), dtype=torch.float32, device=x.device)
    return norm_launch.Kept(pack_for(x), rstd, GROUP)


def norm_forward(
    size: int, device: str, *, adds: bool = False, is_stochastic: bool = True
) -> Launch:
    x = rows_of(size, device)
    residual, total = (torch.randn_like(x), torch.empty_like(x)) if adds else (None, None)
    y, kept, weight = torch.empty_like(x), normed_pack(x), torch.ones_like(x[0])
    assert kept.rstd is not None
    how = (_EPS, False, norm_launch.Noise(noise_on(x, is_stochastic), 1))
    affine = norm_launch.Affine(weight, None)
    call = partial(norm_launch.norm_forward, (x, residual), affine, (y, total), kept, how)
    read, written = _present(x, residual), _present(y, total, kept.buffer, kept.rstd)
    return Launch(call, read, written)


def norm_backward(size: int, device: str, *, adds: bool = False, centres: bool = False) -> Launch:
    dy = rows_of(size, device)
    of_sum = torch.randn_like(dy) if adds else None
    dx, kept, weight = torch.empty_like(dy), normed_pack(dy), torch.ones_like(dy[0])
    assert kept.rstd is not None
    dbias = torch.empty_like(weight) if centres else None
    shares = (norm_backward_launch.Shares(torch.empty_like(weight), dbias), centres)
    call = partial(norm_backward_launch.norm_backward, (dy, of_sum), weight, kept, dx, shares)
    return Launch(call, _present(dy, of_sum, kept.buffer, kept.rstd), (dx,))


def norm_output(size: int, device: str) -> Launch:
    y = rows_of(size, device)
    kept = normed_pack(y)
    affine = norm_launch.Affine(torch.ones_like(y[0]), None)
    return Launch(partial(norm_launch.norm_output, kept, affine, y), (kept.buffer,), (y,))


def glu_forward(size: int, device: str, *, is_stochastic: bool = True) -> Launch:
    gate, up, z = (rows_of(size, device) for _ in range(3))
    packs = pack_for(gate), pack_for(gate)
    state = noise_on(gate, is_stochastic)
    noise = None if state is None else elementwise_launch.Noise(state, (1, 2))
    call = partial(elementwise_launch.glu, (gate, up), z, packs, layout_of(gate), "silu", noise)
    return Launch(call, (gate, up), (z, *packs))


def glu_backward(size: int, device: str) -> Launch:
    dz, dgate, dup, z = (rows_of(size, device) for _ in range(4))
    packs = pack_for(dz), pack_for(dz)
    call = partial(
        elementwise_launch.glu_backward, dz, packs, (dgate, dup), z, layout_of(dz), "silu"
    )
    return Launch(call, (dz, *packs), (dgate, dup, z))


def gelu_forward(size: int, device: str) -> Launch:
    x, y = rows_of(size, device), rows_of(size, device)
    pack, state = pack_for(x), noise_on(x, True)
    assert state is not None
    noise = elementwise_launch.Noise(state, (1,))
    call = partial(elementwise_launch.activation, x, y, pack, layout_of(x), "gelu", noise)
    return Launch(call, (x,), (y, pack))


def gelu_backward(size: int, device: str) -> Launch:
    dy, dx, y = (rows_of(size, device) for _ in range(3))
    pack = pack_for(dy)
    call = partial(elementwise_launch.activation_backward, dy, pack, dx, y, layout_of(dy), "gelu")
    return Launch(call, (dy, pack), (dx, y))


def dropout_add(size: int, device: str) -> Launch:
    x, residual, y = (rows_of(size, device) for _ in range(3))
    key = torch.zeros(2, dtype=torch.int64, device=device)
    call = partial(elementwise_launch.dropout, x, residual, y, key, 65536 - DROPPED)
    return Launch(call, (x, residual), (y,))


def rotary(size: int, device: str) -> Launch:
    """Turn heads as projections leave them, (batch, tokens, heads, size) seen heads first."""
    x = rows_of(size, device, HEADS * HEAD_SIZE)
    y = torch.empty_like(x)
    shape = (-1, min(len(x), TOKENS), HEADS, HEAD_SIZE)
    heads, turned = (tensor.view(shape).transpose(1, 2) for tensor in (x, y))
    cos, sin = (torch.randn_like(heads[0, 0]).expand(heads.shape) for _ in range(2))
    call = partial(rotary_launch.rotate, heads, cos, sin, turned, transposed=False)
    return Launch(call, (x,), (y,))


def cross_entropy(size: int, device: str) -> Launch:
    """Write losses, and gradients over the logits: a chunk of the fused loss."""
    logits = rows_of(size, device, CLASSES)
    targets = torch.zeros(len(logits), dtype=torch.int64, device=device)
    losses = torch.empty(len(logits), dtype=torch.float32, device=device)
    options = cross_entropy_launch.LossOptions(-100, 0.0, None)
    mail = cross_entropy_launch.new_mail(logits, options)
    rows = cross_entropy_launch.LossRows(targets, losses, mail)
    call = partial(cross_entropy_launch.cross_entropy, logits, rows, options, True)
    return Launch(call, (logits,), (logits,))


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


MAKERS: dict[str, Maker] = {
    "norm_forward8": norm_forward,
    "norm_forward8_nearest": partial(norm_forward, is_stochastic=False),
    "norm_forward8_residual": partial(norm_forward, adds=True),
    "norm_backward8": norm_backward,
    "norm_backward8_residual": partial(norm_backward, adds=True),
    "layer_norm_backward8": partial(norm_backward, centres=True),
    "layer_norm_backward8_residual": partial(norm_backward, adds=True, centres=True),
    "norm_output8": norm_output,
    "swiglu_forward8": glu_forward,
    "swiglu_forward8_nearest": partial(glu_forward, is_stochastic=False),
    "swiglu_backward8": glu_backward,
    "gelu_forward8": gelu_forward,
    "gelu_backward8": gelu_backward,
    "dropout_add": dropout_add,
    "rotary": rotary,
    "cross_entropy": cross_entropy,
}
