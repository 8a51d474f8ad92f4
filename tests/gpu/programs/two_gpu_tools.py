"""What the programs on two GPUs share: a process group, a model, and both processes' values."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def join() -> int:
    """Enter the process group of torchrun; return the rank, whose GPU is the current one."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    return rank


@contextmanager
def group() -> Iterator[int]:
    """Be in the process group, and leave it when all are done."""
    yield join()
    distributed.barrier()
    distributed.destroy_process_group()


class Block(nn.Module):
    """A norm, two products and a residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int, width: int, inner: int) -> nn.Sequential:
    """Return a model of blocks, the same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, inner) for _ in range(count))).cuda()


def wrapped(kind: str, model: nn.Sequential, rank: int) -> nn.Module:
    """Return a model as "ddp" or "fsdp" has it."""
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[rank])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def gathered(value: Any) -> list[Any]:
    """Return every process's value."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
