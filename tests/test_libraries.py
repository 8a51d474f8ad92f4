"""Models of libraries that no family knows: hooks, and optimize, do nothing wrong to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimize_tools import INT8_NOISE, ROUNDING, error

import vramx


def graph_network() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    library: Any = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    model = library.GAT(64, 64, num_layers=2, heads=4, act="gelu").train()
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randn(200, 64, generator=generator)
    return model, (nodes, torch.randint(0, 200, (2, 800), generator=generator))


def gradient(model: Any, inputs: Any) -> torch.Tensor:
    model.zero_grad()
    y = model(*inputs)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (y * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_graph_network_under_hooks_learns_within_the_noise() -> None:
    model, inputs = graph_network()
    exact = gradient(model, inputs)
    vramx.compressed_activations(model, min_bytes=0)
    found = gradient(model, inputs)
    assert vramx.compression_stats(model).packed.tensors > 0
    assert 0 < error(found, exact) < INT8_NOISE
    vramx.restore(model)
    assert torch.equal(gradient(model, inputs), exact)


def test_graph_network_is_left_by_optimize() -> None:
    model, inputs = graph_network()
    exact = gradient(model, inputs)
    assert not vramx.optimize(model).swapped
    assert error(gradient(model, inputs), exact) < ROUNDING
