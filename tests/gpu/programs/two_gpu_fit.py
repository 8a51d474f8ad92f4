"""Fits a batch to two GPUs of different room, one process each, under torchrun.

    two_gpu_fit.py ddp|fsdp

Rank 0 prints what both were told, the batch that a search by hand finds (the largest of which both
have room for two steps), and whether 200 more steps of random lengths went through.
"""

import gc
import json
import random
import sys

import torch
from two_gpu_tools import blocks, gathered, group, wrapped

import vramx

WIDTH, LAYERS, LENGTH, STEPS = 1024, 4, 512, 200
ROOM_BYTES = (6 << 30, 5 << 30)  # of each rank


def main(rank: int) -> None:
    total = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(ROOM_BYTES[rank] / total)
    model = wrapped(sys.argv[1], blocks(LAYERS, WIDTH, 4 * WIDTH), rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: int, length: int = LENGTH) -> None:
        model(torch.randn(batch, length, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def fits(batch: int, budget_bytes: int) -> bool:
        """Tell whether both stay within their budgets, far from where one would wait for ever."""
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step(batch)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        optimizer.state.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return all(gathered(peak <= budget_bytes))

    found = vramx.fit_batch(step, margin=0.15)
    by_hand = found.batch
    while by_hand > 1 and not fits(by_hand, found.budget_bytes):
        by_hand -= 1
    while fits(by_hand + 1, found.budget_bytes):
        by_hand += 1
    generator = random.Random(rank)
    for _ in range(STEPS):
        step(found.batch, generator.randint(LENGTH // 2, LENGTH))
    torch.cuda.synchronize()
    told = gathered([found.batch, len(found.attempts), found.peak_bytes <= found.budget_bytes])
    if rank == 0:
        print(json.dumps({"told": told, "by_hand": by_hand, "steps": STEPS}), flush=True)


if __name__ == "__main__":
    with group() as rank:
        main(rank)
