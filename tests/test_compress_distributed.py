"""Compressed modules under DistributedDataParallel and sharding, on two processes of this host.

The processes import this file: it imports nothing that takes long.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compress_tools import Block, gradient, relative_error
from distributed_tools import SHARDS_ON_HOSTS, run_on_two
from torch import nn

import vramx


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run everything on two processes; return what each saved, by name."""
    return run_on_two(_run, tmp_path_factory.mktemp("distributed"))


def _run(rank: int) -> dict[str, Any]:
    result: dict[str, Any] = {"replicas": _run_replicas(rank)}
    if SHARDS_ON_HOSTS:
        result["sharded"] = _run_sharded()
    return result


def _run_replicas(rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(2, 4, 16, 64)
    exact = (gradient(block, x[0]) + gradient(block, x[1])) / 2
    vramx.compressed_activations(block, min_bytes=0)
    replica = nn.parallel.DistributedDataParallel(block)
    found = gradient(replica, x[rank])
    return found, exact, vramx.compression_stats(block).packed.tensors


def test_replicas_agree_on_the_gradient(results: list[dict[str, Any]]) -> None:
    (one, exact, count), (two, _, _) = (result["replicas"] for result in results)
    assert torch.equal(one, two)
    assert count > 0
    assert 0 < relative_error(one, exact) < 0.05


def _run_sharded() -> tuple[torch.Tensor, torch.Tensor, int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 16, 64)
    exact = gradient(model, x)
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(vramx.compressed_activations(block, min_bytes=0), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.zero_grad()
    model(x.requires_grad_() * 1.0).square().mean().backward()
    found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    stats = vramx.compression_stats(model[0])
    return found, exact, stats.packed.tensors, stats.kept["parameter"].tensors


@pytest.mark.skipif(not SHARDS_ON_HOSTS, reason="this torch's FSDP2 does not average on hosts")
def test_sharded_parameters_pass_by_reference(results: list[dict[str, Any]]) -> None:
    found, exact, packed, kept = results[0]["sharded"]
    assert packed > 0
    assert kept == 10  # six weights and the norms' four
    assert 0 < relative_error(found, exact) < 0.05
