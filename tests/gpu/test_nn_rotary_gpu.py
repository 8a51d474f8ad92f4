"""Rotary embedding on a GPU: the compiled kernel against float64, at the sizes of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vramx.nn.functional import rotary

pytestmark = pytest.mark.gpu

BATCH, HEADS, KEY_HEADS, TOKENS = 2, 32, 8, 1025
# A sum of two products in float32, rounded once; |x cos| + |x sin| <= 1.5 of the largest |x|.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("dtype", UNIT, ids=lambda dtype: str(dtype)[6:])
def test_values_and_gradients_are_rounded_once(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k = (
        normal(BATCH, TOKENS, heads, size).to(dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS)
    )
    angles = normal(BATCH, 1, TOKENS, size)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    exact = rotary(*wide, cos.double(), sin.double())
    found = rotary(q, k, cos, sin)
    incoming = [normal(*x.shape).to(dtype) for x in found]
    gradients = torch.autograd.grad(found, [q, k], incoming)
    of_exact = torch.autograd.grad(exact, wide, [g.double() for g in incoming])
    for ours, theirs in zip((*found, *gradients), (*exact, *of_exact), strict=True):
        assert ours.dtype == dtype
        bound = UNIT[dtype] * theirs.abs() + 2.0**-20 * theirs.abs().max()
        assert ((ours - theirs).abs() <= bound).all()


def test_compiled_is_the_same() -> None:
    torch.compiler.reset()
    q = torch.randn(2, 4, 16, 64, device="cuda", requires_grad=True)
    angles = torch.randn(16, 64, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    compiled = torch.compile(lambda q: rotary(q, q, cos, sin)[0], fullgraph=True)
    assert torch.allclose(compiled(q), rotary(q, q, cos, sin)[0], atol=1e-5)
