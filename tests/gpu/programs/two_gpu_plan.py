"""Plans and trains on two GPUs, one process each, under torchrun.

    two_gpu_plan.py ddp|fsdp

The second process has half as many rows more. Rank 0 prints for each budget what both planned, and
the peaks that both had in their own loop.
"""

import json
import sys

import torch
from torch import nn
from two_gpu_tools import blocks, gathered, group, wrapped

import vramx

WIDTH, LAYERS, ROWS, STEPS = 1024, 6, 8192, 3


def peak_of_loop(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main(rank: int) -> None:
    model = wrapped(sys.argv[1], blocks(LAYERS, WIDTH, 4 * WIDTH), rank)
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


if __name__ == "__main__":
    with group() as rank:
        main(rank)
