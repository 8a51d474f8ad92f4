"""Which of CUDA's attention kernels takes a call, and that it is called by arguments it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vramx.nn import attention_kernels as kernels

HALVES = torch.bfloat16


@pytest.mark.parametrize(
    ("expected", "dtype", "size", "mask", "causal"),
    [
        (kernels.FLASH, torch.bfloat16, 64, None, False),
        (kernels.FLASH, torch.float16, 64, None, False),
        (kernels.EFFICIENT, torch.float32, 64, None, False),
        (kernels.EFFICIENT, HALVES, 64, torch.ones(8, 16), False),
        (kernels.EFFICIENT, HALVES, 64, None, True),  # and not square
        (kernels.EFFICIENT, HALVES, 264, None, False),
        (kernels.NO_KERNEL, HALVES, 60, None, False),
        (kernels.NO_KERNEL, torch.float64, 64, None, False),
    ],
)
def test_flash_takes_plain_halves_and_efficient_what_else_has_a_kernel(
    monkeypatch: Any, expected: int, dtype: torch.dtype, size: int, mask: Any, causal: bool
) -> None:
    monkeypatch.setattr(kernels, "_allowed", lambda device: (256, True, True))
    q, k = torch.empty(2, 4, 8, size, dtype=dtype), torch.empty(2, 4, 16, size, dtype=dtype)
    assert kernels._of_cuda(q, k, mask, kernels.Call(0, 0.0, causal, None)) == expected


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("kernel", [kernels.FLASH, kernels.EFFICIENT])
def test_kernels_of_cuda_accept_the_call(kernel: int, masked: bool) -> None:
    """On tensors without data, which torch checks against the operators' own declarations."""
    call = kernels.Call(kernel, 0.0, False, None)
    q, k, v = (
        torch.empty(2, heads, tokens, 64, dtype=torch.bfloat16, device="meta")
        for heads, tokens in ((4, 8), (2, 10), (2, 10))
    )
    mask = torch.ones(8, 10, dtype=torch.bool, device="meta") if masked else None
    y, *state = kernels.forward(call, (q, k, v), mask)
    found = kernels.backward(call, torch.empty_like(y), (q, k, v, y), mask, state)
    assert y.shape == q.shape
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("shape", [(8, 10), (1, 10), (2, 1, 8, 10), (2, 1, 1, 10), (1, 1, 8, 1)])
def test_rows_of_a_prepared_mask_are_aligned(shape: tuple[int, ...]) -> None:
    q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 4, 10, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(shape, dtype=torch.bool, device="meta")
    prepared = kernels.prepared_mask(mask, q, k)
    assert prepared.shape == (2, 4, 8, 10)
    assert all(stride % 16 == 0 for stride in prepared.stride()[:3])
    assert prepared.stride(3) == 1
