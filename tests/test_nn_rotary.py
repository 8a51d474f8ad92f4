"""Rotary embedding: values, gradients, what is kept; the kernel in Triton's interpreter.

In float32 the kernel and the composite round three times each, at values of order 1: CLOSE.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted_nn import Evaluated, evaluate, interpreted_nn
from nn_elementwise_tools import differs
from norm_tools import held_bytes, sample
from torch import Tensor

from vramx.errors import InvalidValueError
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


@pytest.fixture(scope="module")
def kernels() -> Callable[..., Evaluated]:
    return interpreted_nn().function


def kernel_call(size: int) -> tuple[str, list[Tensor], Tensor, dict[str, Tensor]]:
    """Queries with tokens first in memory, and cosines for all heads; halves of sines differ."""
    q = sample(2, 5, 3, size).detach().transpose(1, 2)
    k = sample(2, 1, 5, size, seed=1).detach()
    angles = sample(2, 1, 5, size, seed=2).detach()
    options = {"cos": angles.cos(), "sin": angles.sin()}
    return "rotary.rotary", [q, k], sample(2, 3, 5, size, seed=3).detach(), options


@pytest.mark.parametrize("size", [512, 128, 64, 12, 2])  # of 512, a program takes 2 blocks of heads
def test_kernel_is_the_composite(size: int, kernels: Callable[..., Evaluated]) -> None:
    found, expected = kernels(*kernel_call(size)), evaluate(*kernel_call(size))
    assert differs(found.result, expected.result) <= 1
    assert differs(found.gradients[0], expected.gradients[0]) <= 1


def test_comparison_sees_a_gradient_that_is_not_transposed(
    kernels: Callable[..., Evaluated],
) -> None:
    call = kernel_call(12)
    found = kernels(*call, defect="the opposite angle")
    assert differs(found.gradients[0], evaluate(*call).gradients[0]) > 1


def test_derivatives_are_right_to_second_order() -> None:
    q, k, cos, sin = tensors()
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))


def test_nothing_is_kept_but_the_angles() -> None:
    q, k, cos, sin = tensors()
    assert held_bytes(lambda: rotary(q, k, cos, sin), cos, sin) == 0


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
    compiled = torch.compile(
        lambda q, k: rotary(q, k, cos, sin), fullgraph=True, backend="aot_eager"
    )
    (found,) = torch.autograd.grad(compiled(q, k)[0].square().sum(), q)
    (expected,) = torch.autograd.grad(rotary(q, k, cos, sin)[0].square().sum(), q)
    assert torch.allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize(
    ("shape", "angles", "text"),
    [
        ((2, 3, 7), (3, 7), "even last size"),
        ((2, 3, 8), (3, 4), r"q has shape \(2, 3, 8\) and cos \(3, 4\)"),
        ((2, 3, 8), (4, 8), "broadcasts"),
        ((3, 8), (2, 3, 8), "broadcasts"),
    ],
)
def test_mistakes_are_named(shape: tuple[int, ...], angles: tuple[int, ...], text: str) -> None:
    x = torch.zeros(shape)
    with pytest.raises(InvalidValueError, match=text):
        rotary(x, x, torch.zeros(angles), torch.zeros(angles))
