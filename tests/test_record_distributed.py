"""vramx.record under DistributedDataParallel and sharding, on two processes of this host.

The processes import this file: it imports nothing that takes long.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from distributed_tools import SHARDS_ON_HOSTS, run_on_two
from record_tools import by_category, features, loss_of, recorder, residuals, storage_bytes
from torch import nn

from vramx.memory import categories as names
from vramx.memory.snapshot import Snapshot
from vramx.memory.tensors import plain_tensors


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run everything on two processes; return what each saved, by name."""
    return run_on_two(_run, tmp_path_factory.mktemp("distributed"))


def _run(rank: int) -> dict[str, Any]:
    result = {"replicas": _train(*_replicas())}
    if SHARDS_ON_HOSTS:
        result["sharded"] = _train(*_sharded())
    return result


def _replicas() -> tuple[nn.Module, nn.Module]:
    model = residuals()
    return model, nn.parallel.DistributedDataParallel(model)


def _sharded() -> tuple[nn.Module, nn.Module]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = residuals()
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def _train(model: nn.Module, called: nn.Module) -> dict[str, Any]:
    """Train two steps; return the files and what was counted before the second optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters())
    source = CpuHistory()
    with TemporaryDirectory() as folder:
        with recorder(Path(folder) / "run.pickle", source, model, optimizer):
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(called(*features()[0])).backward()
                moment = len(source.entries) - 1
                live = sum(source.live.values())
                optimizer.step()
            expected = {
                names.PARAMETERS: _bytes(model.parameters()),
                names.GRADIENTS: _bytes(p.grad for p in model.parameters()),
                names.OPTIMIZER: _bytes(t for s in optimizer.state.values() for t in s.values()),
            }
        (path,) = Path(folder).iterdir()
        found = by_category(Snapshot.load(path), moment)
    return {"file": path.name, "found": found, "expected": expected, "live": live}


def _bytes(tensors: Any) -> int:
    return storage_bytes(plain for tensor in tensors for plain in plain_tensors(tensor))


PROGRAMS = ("replicas", "sharded") if SHARDS_ON_HOSTS else ("replicas",)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_rank_has_its_own_file_with_the_categories_of_its_memory(
    program: str, results: list[dict[str, Any]]
) -> None:
    for rank, result in enumerate(results):
        found, expected = result[program]["found"], result[program]["expected"]
        assert result[program]["file"] == f"run.rank{rank}.pickle"
        assert sum(found.values()) == result[program]["live"]
        assert {name: found[name] for name in expected} == expected
