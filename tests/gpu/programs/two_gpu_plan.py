"""Plans and trains on two GPUs, one process each, under torchrun.

    two_gpu_plan.py ddp|fsdp

The second process has half as many rows more. Rank 0 prints for each budget what both planned, and
the peaks that both had in their own loop.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import vramx

WIDTH, LAYERS, ROWS, STEPS = 1024, 6, 8192, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def wrapped(kind: str, rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).cuda()
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[rank])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def peak_of_loop(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def gathered(value: Any) -> list[Any]:
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    model = wrapped(sys.argv[1], rank)
    x = torch.randn(ROWS + ROWS // 2 * rank, WIDTH, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    widest = vramx.plan(model, x, optimizer=optimizer)
    low, high = widest.with_budget(x, "smallest").needed_bytes, widest.needed_bytes
    facts = []
    for part in range(3):
        plan = widest.with_budget(x, low + (high - low) * part // 2).apply()
        peak = peak_of_loop(model, x, optimizer)
        plan.undo()
        facts.append(
            {
                "budget": plan.budget_bytes,
                "planned": plan.measured_bytes,
                "words": sorted(set(plan.words.values())),
                "texts": gathered(str(plan)),
                "peaks": gathered(peak),
            }
        )
    if rank == 0:
        print(json.dumps({"plans": facts}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
