"""Rotary embedding: values, gradients and what is kept."""

from __future__ import annotations

import torch
from norm_tools import sample
from torch import Tensor

from vramx.nn.functional import rotary

BATCH, HEADS, KEY_HEADS, TOKENS, SIZE = 2, 2, 1, 3, 4


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = sample(BATCH, HEADS, TOKENS, SIZE, dtype=dtype)
    k = sample(BATCH, KEY_HEADS, TOKENS, SIZE, seed=1, dtype=dtype)
    # Halves that differ: the transposed matrix is then more than the opposite angle.
    angles = sample(BATCH, 1, TOKENS, SIZE, seed=2, dtype=torch.float64).detach()
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def by_matrix(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = SIZE // 2
    turn = torch.zeros(SIZE, SIZE, dtype=x.dtype)
    turn[torch.arange(half), torch.arange(half) + half] = -1
    turn[torch.arange(half) + half, torch.arange(half)] = 1
    return x * cos + (x @ turn.t()) * sin


def test_rotates_as_the_matrix_does() -> None:
    q, k, cos, sin = tensors()
    for found, x in zip(rotary(q, k, cos, sin), (q, k), strict=True):
        assert torch.allclose(found, by_matrix(x, cos, sin), atol=1e-14)


def test_learned_angles_have_gradients() -> None:
    q, k, cos, sin = tensors()
    cos.requires_grad_()
    (dcos,) = torch.autograd.grad(rotary(q, k, cos, sin)[0].sum(), cos)
    assert torch.allclose(dcos, q.sum(1, keepdim=True), atol=1e-14)


def test_types_are_those_of_a_product() -> None:
    q, k, cos, sin = tensors(torch.bfloat16)
    assert rotary(q, k, cos, sin)[0].dtype == torch.bfloat16
    turned, _ = rotary(q, k, cos.float(), sin.float())
    assert turned.dtype == torch.float32
    (dq,) = torch.autograd.grad(turned.sum(), q)
    assert dq.dtype == torch.bfloat16


def test_compiles_to_one_graph() -> None:
    torch.compiler.reset()
    q, k, cos, sin = tensors()
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(q, k, cos, sin)[0].square().sum(), q)
    (expected,) = torch.autograd.grad(rotary(q, k, cos, sin)[0].square().sum(), q)
    assert torch.allclose(found, expected, atol=1e-14)
