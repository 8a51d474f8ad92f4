"""Compressed modules under DistributedDataParallel and sharding, on two processes of this host.

The processes import this file: it imports nothing that takes long.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as processes
from compress_tools import Block, gradient, relative_error
from torch import nn
from torch.torch_version import TorchVersion

import vramx

# Before torch 2.9 sharded gradients of hosts are added up and not averaged; 2.6 shards none there.
_SHARDS_ON_HOSTS = TorchVersion(torch.__version__) >= (2, 9)
# A process that waits for another one that died fails, and so does the test that waits for both.
_LIMIT_S = 60


def _join_the_group(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_LIMIT_S / 2),
    )


def _leave(rank: int, folder: str, result: dict[str, Any]) -> None:
    """Save the results and end, when the other process has ended its work too.

    Without destructors: torch's, of the group and of what uses it, join threads that may wait for
    the interpreter lock, which they hold (torch 2.13, one run in five on two cores).
    """
    torch.save(result, f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    deadline = time.monotonic() + _LIMIT_S / 2
    while not os.path.exists(f"{folder}/{1 - rank}.pt") and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run everything on two processes; return what each saved, by name."""
    folder = tmp_path_factory.mktemp("distributed")
    context = processes.spawn(_run, args=(str(folder),), nprocs=2, join=False)
    try:
        deadline = time.monotonic() + _LIMIT_S
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the processes are still running"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def _run(rank: int, folder: str) -> None:
    _join_the_group(rank, folder)
    result: dict[str, Any] = {"replicas": _run_replicas(rank)}
    if _SHARDS_ON_HOSTS:
        result["sharded"] = _run_sharded()
    _leave(rank, folder, result)


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


@pytest.mark.skipif(not _SHARDS_ON_HOSTS, reason="this torch's FSDP2 does not average on hosts")
def test_sharded_parameters_pass_by_reference(results: list[dict[str, Any]]) -> None:
    found, exact, packed, kept = results[0]["sharded"]
    assert packed > 0
    assert kept == 10  # six weights and the norms' four
    assert 0 < relative_error(found, exact) < 0.05
