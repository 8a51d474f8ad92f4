"""Weights that are split over two processes, whose activations both of them hold, or parts of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_tools import run_on_two
from torch import nn

import vramx

WIDTH = 64


class Block(nn.Module):
    """A norm that both processes have, and a feed-forward part that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def split(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        names = ("up", "down") if isinstance(block, Block) else ("linear1", "linear2")
        parallelize_module(block, mesh, {names[0]: ColwiseParallel(), names[1]: RowwiseParallel()})
    return model


def fused(model: nn.Sequential) -> None:
    vramx.optimize(model, "int8", min_bytes=256)


def packed(model: nn.Sequential) -> None:
    for block in model:
        vramx.compressed_activations(block, min_bytes=256)


def checkpointed(model: nn.Sequential) -> None:
    vramx.checkpoint_modules(model, where=Block, level=vramx.Compression(min_bytes=256))


WAYS: dict[str, Callable[[nn.Sequential], None]] = {
    "fused": fused,
    "packed": packed,
    "checkpointed": checkpointed,
}


def gradients(model: nn.Sequential) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(4, 16, WIDTH)).square().sum().backward()
    found: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def run(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 128, 0.0, activation="gelu", batch_first=True, norm_first=True
    )
    original = nn.Sequential(Block(), layer, Block())
    result: dict[str, Any] = {"exact": gradients(copy.deepcopy(original))}
    for name, way in WAYS.items():
        model = copy.deepcopy(original)
        way(model)
        result[name] = gradients(split(model))
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two(run, tmp_path_factory.mktemp("tensor_parallel"))


@pytest.mark.parametrize("way", WAYS)
def test_what_both_processes_hold_has_one_gradient(way: str, results: list[dict[str, Any]]) -> None:
    first, second = (each[way] for each in results)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_whole_model(way: str, results: list[dict[str, Any]]) -> None:
    for each in results:
        for name, expected in each["exact"].items():
            cosine = torch.cosine_similarity(expected.flatten(), each[way][name].flatten(), dim=0)
            assert cosine > 0.9993
