"""Rows of different scale are normalised each by its own deviation, and packed apart.

In a group with a larger row a small one is next to nothing, and its gradient, which is divided by
its deviation, would be noise. Rows differ by up to 10,000 times here; each gradient has a cosine
of 0.999 with the exact one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import vramx
from vramx.compression.policy import SavePolicy

COSINE = 0.999
NORMS: dict[str, Any] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "group": lambda width: nn.GroupNorm(2, width),
}
WIDTHS = (8, 24, 48, 64, 96, 128, 192, 320)


def worst_cosine(norm: nn.Module, x: Tensor, **options: Any) -> float:
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def gradients(module: nn.Module, x: Tensor, packed: bool) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(), *module.parameters()]
        with vramx.compress(min_bytes=0, **options) if packed else nullcontext():
            y = module(leaves[0] * 1)
        return torch.autograd.grad(y, leaves, dy.to(y.dtype))

    found = gradients(norm, x, True)
    exact = gradients(norm.double(), x.double(), False)
    norm.float()
    return min(
        float(functional.cosine_similarity(a.double().flatten(), b.flatten(), 0))
        for a, b in zip(found, exact, strict=True)
    )


def uneven(rows: int, *shape: int) -> Tensor:
    """Return rows of different scale, in no order."""
    torch.manual_seed(0)
    scales = torch.logspace(-2, 2, rows)[torch.randperm(rows)]
    return torch.randn(rows, *shape) * scales.view(-1, *(1,) * len(shape))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NORMS)
def test_rows_of_different_scale_do_not_share_a_group(name: str, width: int) -> None:
    assert worst_cosine(NORMS[name](width), uneven(64, width)) >= COSINE


def test_dimensions_that_are_normalised_together_are_one_row() -> None:
    assert worst_cosine(nn.LayerNorm((4, 24)), uneven(64, 4, 24)) >= COSINE


def test_a_larger_group_is_made_smaller() -> None:
    assert worst_cosine(nn.LayerNorm(64), uneven(64, 64), group_size=1024) >= COSINE


def test_rows_that_are_columns_in_memory_are_kept() -> None:
    x = uneven(64, 128).t().contiguous().t()
    assert not x.is_contiguous()
    assert worst_cosine(nn.LayerNorm(128), x) >= COSINE


def test_rows_of_whole_groups_are_packed_as_ever() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    with vramx.compress(min_bytes=0) as stats:
        nn.LayerNorm(256)(x * 1)
    assert (
        stats.operations["layer_norm"].kept_bytes < 0.3 * stats.operations["layer_norm"].seen_bytes
    )


@pytest.mark.parametrize("name", NORMS)
def test_groups_that_span_rows_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavePolicy, "_norm", lambda self, *_: (8, "", 0))
    assert worst_cosine(NORMS[name](48), uneven(64, 48)) < 0.99
