"""Attention on a GPU: torch's fused kernels called by vramx, results, gradients, dropout, memory.

On a CPU (tests/test_nn_attention.py) the arithmetic of what is kept is shown; here that flash,
cuDNN's and the memory-efficient kernel are called rightly. Each is compared with torch's own call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.programs._window import windowed
from gpu.tools import captured
from vramx.nn import attention_kernels as kernels
from vramx.nn.functional import linear, scaled_dot_product_attention

pytestmark = pytest.mark.gpu

BATCH, HEADS, KEY_HEADS, TOKENS, SIZE = 2, 8, 2, 130, 64
BACKENDS = {
    kernels.FLASH: SDPBackend.FLASH_ATTENTION,
    kernels.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    kernels.CUDNN: SDPBackend.CUDNN_ATTENTION,
}
every_kernel = pytest.mark.parametrize("kernel", BACKENDS, ids=["flash", "efficient", "cudnn"])


def inputs(dtype: torch.dtype = torch.bfloat16, key_heads: int = KEY_HEADS) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(BATCH, TOKENS, heads, SIZE, generator=generator, device="cuda", dtype=dtype)
        .transpose(1, 2).requires_grad_()
        for heads in (HEADS, key_heads, key_heads)
    ]  # fmt: skip


def both(
    kernel: int, tensors: list[Tensor], **call: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the result and the gradients, ours and torch's of the same kernel."""
    generator = torch.Generator("cuda").manual_seed(9)
    dy = torch.randn(BATCH, TOKENS, HEADS, SIZE, device="cuda", generator=generator)
    # As an output projection's backward leaves it. torch 2.11 reads a gradient of cuDNN's attention
    # that lies otherwise as if it lay as the first one of these sizes did.
    dy = dy.to(tensors[0].dtype).transpose(1, 2)
    found = []
    with sdpa_kernel(BACKENDS[kernel]):
        torch.manual_seed(3)
        attended = scaled_dot_product_attention(*tensors, enable_gqa=True, **call)
        assert attended.kept is not None
        found.append((attended.y, *torch.autograd.grad(attended.y, tensors, dy)))
        torch.manual_seed(3)
        q, k, v = tensors
        shares = kernel != kernels.EFFICIENT  # it takes no fewer heads of keys
        if not shares:
            k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=shares, **call)
        found.append((y, *torch.autograd.grad(y, tensors, dy)))
    return found[0], found[1]


@every_kernel
@pytest.mark.parametrize(
    "call", [{}, {"is_causal": True}, {"dropout_p": 0.25}, {"scale": 0.3}], ids=str
)
def test_is_torchs_but_for_what_is_packed(kernel: int, call: dict[str, Any]) -> None:
    """int8 puts 1 to 2 % on dq and dk of normal inputs; another mask of dropout would put 100."""
    if kernel == kernels.CUDNN and "dropout_p" in call:
        pytest.skip("cuDNN's kernel is not called with dropout")
    (y, dq, dk, dv), (of_y, of_q, of_k, of_v) = both(kernel, inputs(), **call)
    assert torch.equal(y, of_y)
    for ours, theirs in ((dq, of_q), (dk, of_k)):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()
    # Sums over shared heads are rounded to bfloat16 in another order.
    assert (dv - of_v).norm() <= 2.0**-6 * of_v.norm()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("keys", [128, TOKENS], ids=["aligned", "odd"])
def test_efficient_takes_masks(kind: str, keys: int) -> None:
    q, k, v = inputs()
    k, v = (x[:, :, :keys].detach().requires_grad_() for x in (k, v))
    allowed = torch.ones(TOKENS, keys, dtype=torch.bool, device="cuda").tril()
    mask = allowed if kind == "bool" else (~allowed).to(q.dtype) * -10000.0
    (y, dq, *_), (of_y, of_q, *_) = both(kernels.EFFICIENT, [q, k, v], attn_mask=mask)
    assert torch.equal(y, of_y)
    assert (dq - of_q).norm() <= 0.05 * of_q.norm()


@every_kernel
def test_gradients_do_not_depend_on_how_the_results_gradient_lies_in_memory(kernel: int) -> None:
    tensors = inputs()
    dy = torch.randn(BATCH, HEADS, TOKENS, SIZE, device="cuda", dtype=torch.bfloat16)
    found = []
    with sdpa_kernel(BACKENDS[kernel]):
        for laid_out in (dy, dy.transpose(1, 2).contiguous().transpose(1, 2)):
            y = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).y
            found.append(torch.autograd.grad(y, tensors, laid_out))
    for one, other in zip(*found, strict=True):
        # Two draws of int8's noise.
        assert (one - other).norm() <= 0.05 * one.norm()


def test_float32_is_served_by_the_efficient_kernel() -> None:
    (y, dq, *_), (of_y, of_q, *_) = both(kernels.EFFICIENT, inputs(torch.float32))
    assert torch.equal(y, of_y)
    assert (dq - of_q).norm() <= 0.05 * of_q.norm()


def test_the_kernel_is_the_one_that_torch_chooses() -> None:
    q, k, v = inputs()
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True)
    (ours,) = (kernel for kernel, backend in BACKENDS.items() if backend.value == chosen)
    call = kernels.Call(kernels.NO_KERNEL, 0.0, True, None)
    assert kernels._of_cuda(q, k, None, call) == ours
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels._of_cuda(q, k, None, call) == kernels.FLASH
    finally:
        torch.use_deterministic_algorithms(False)


def test_attention_and_projection_can_be_captured() -> None:
    tensors = inputs()
    weight = torch.randn(32, HEADS * SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        attended = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        y = linear(attended.y.transpose(1, 2).flatten(2), weight, kept=attended.kept)
        return torch.autograd.grad(y.float().sum(), [*tensors, weight])

    expected = step()
    graph, found = captured(step)
    graph.replay()
    for ours, exact in zip(found, expected, strict=True):
        # Two draws of int8's noise.
        assert (ours - exact).norm() <= 0.05 * exact.norm()


def test_compiles_to_one_graph() -> None:
    torch.compiler.reset()
    tensors = inputs()

    def block(*tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).y

    compiled = torch.compile(block, fullgraph=True)
    y = compiled(*tensors)
    assert torch.equal(y, block(*tensors))
    found = torch.autograd.grad(y.float().square().sum(), tensors)
    expected = torch.autograd.grad(block(*tensors).float().square().sum(), tensors)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("ours", [True, False], ids=["vramx", "torch"])
def test_a_benchmarks_window_is_that_of_a_mask(ours: bool) -> None:
    """Of all tokens, too: the benchmark of the longest sequences has its memory from there."""
    tensors = inputs()
    dy = torch.ones_like(tensors[0])
    back = torch.arange(TOKENS, device="cuda")[:, None] - torch.arange(TOKENS, device="cuda")
    for window in (16, TOKENS):
        with windowed(window, of_blocks=ours):
            if ours:
                y = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).y
            else:
                y = functional.scaled_dot_product_attention(
                    *tensors, is_causal=True, enable_gqa=True
                )
            found = y, *torch.autograd.grad(y, tensors, dy)
        mask = (back >= 0) & (back <= window)
        y = functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
        expected = y, *torch.autograd.grad(y, tensors, dy)
        for each, exact in zip(found, expected, strict=True):
            assert (each - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("tokens", [64, 512])
def test_a_pass_without_gradients_drops_what_one_with_gradients_does(tokens: int) -> None:
    tensors = [
        torch.randn(2, 4, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    found = []
    for with_gradients in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(with_gradients):
            found.append(scaled_dot_product_attention(*tensors, dropout_p=0.3).y)
    assert torch.equal(*found)
