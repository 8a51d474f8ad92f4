"""Adapters in fused blocks on a GPU: their kernels, their masks, and the memory that they keep.

The formulas are compared on the host (tests/test_nn_sides.py); here is what only a GPU shows. The
adapters of whole blocks are peft's where it is installed, else stand-ins of the same structure.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_tools import EXACT
from optimize_tools import error, llama_block
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import vramx
from benchmarks.programs._adapters import Adapters, adapt
from vramx.nn.dropout import dropout
from vramx.nn.linear import linears
from vramx.nn.low_rank import add_low_rank
from vramx.nn.norm import rms_norm
from vramx.nn.readers import Behind
from vramx.nn.sides import Side
from vramx.nn.unit_linear import unit_linear

pytestmark = pytest.mark.gpu

HIDDEN, INNER, RANK, ROWS = 512, 1536, 16, 1024
Function = Callable[..., Tensor]


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator) / (shape[-1] ** 0.5)
    return x.to(dtype).requires_grad_()


def terms() -> list[Tensor]:
    """Return x, gate, up and down weights that are frozen, and an adapter of the gate and down."""
    x = leaf(ROWS, HIDDEN, seed=0) * HIDDEN**0.5
    frozen = [leaf(INNER, HIDDEN, seed=1), leaf(INNER, HIDDEN, seed=2), leaf(HIDDEN, INNER, seed=3)]
    adapters = [
        *(leaf(RANK, HIDDEN, seed=4), leaf(INNER, RANK, seed=5)),
        *(leaf(RANK, INNER, seed=6), leaf(HIDDEN, RANK, seed=7)),
    ]
    return [x.detach().requires_grad_(), *(each.detach() for each in frozen), *adapters]


def fused(*tensors: Tensor, p: float = 0.0, keep: Any = None) -> Tensor:
    x, gate, up, down, a, b, c, d = tensors
    source = rms_norm(x, None, 1e-5, keep=keep)
    g, u, h = linears(source, [gate, up], None, keep, sides=[Side(a, p)])
    g = add_low_rank(g, h, b, None, 2.0)
    y, h2 = unit_linear((g, u), "silu", Behind(down, None, x, Side(c, p)), keep)
    assert h2 is not None
    return add_low_rank(y, h2, d, None, 2.0)


def plain(*tensors: Tensor, p: float = 0.0) -> Tensor:
    x, gate, up, down, a, b, c, d = tensors
    y = F.rms_norm(x, (HIDDEN,), None, 1e-5)
    # Keys are drawn in the order of the fused function.
    g = F.linear(y, gate) + 2.0 * F.linear(F.linear(dropout(y, p), a), b)
    z = F.silu(g) * F.linear(y, up)
    return F.linear(z, down) + x + 2.0 * F.linear(F.linear(dropout(z, p), c), d)


def run(function: Function, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    y = function(*tensors, **options)
    incoming = leaf(*y.shape, seed=9).to(y.dtype)
    inputs = [t for t in tensors if t.requires_grad]
    return [y, *torch.autograd.grad(y, inputs, incoming)]


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_fused_adapters_are_as_near_to_the_exact_ones_as_torchs(p: float) -> None:
    tensors = terms()
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    # In float64 the host's formula draws the masks: the same of the same keys.
    exact = run(plain, wide, p=p)
    theirs, ours = run(plain, tensors, p=p), run(fused, tensors, p=p, keep=EXACT)
    for found, plainly, right in zip(ours, theirs, exact, strict=True):
        assert error(found, right) <= 1.5 * error(plainly, right)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_packed_adapters_learn_within_the_noise(p: float) -> None:
    tensors = terms()
    exact, found = run(fused, tensors, p=p, keep=EXACT), run(fused, tensors, p=p)
    assert torch.equal(exact[0], found[0])
    for ours, right in zip(found[1:], exact[1:], strict=True):
        # Packs of 8 bits are off by 1.6 %, and gradients pass through three.
        assert error(ours, right) < 0.016 * 3**0.5


# A mask of dropout is a byte here, of which eager has seven.
@pytest.mark.parametrize(("rate", "least"), [(0.0, 3.7), (0.05, 4.9)])
def test_adapted_llama_block_keeps_so_many_times_less_than_eager(rate: float, least: float) -> None:
    block, call = llama_block(2048, tokens=2048, device="cuda")
    adapt(block, Adapters(rank=8, dropout=rate), torch.bfloat16)

    def kept() -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = block(**call)
        found = torch.cuda.memory_allocated() - before - y.nbytes  # the caller's own
        y.sum().backward()
        return int(found)

    kept()  # what libraries allocate once
    eager = kept()
    vramx.optimize(block)
    kept()
    assert eager / kept() > least
