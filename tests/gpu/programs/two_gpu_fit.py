"""Fits a batch on two GPUs, one process each, under torchrun, and trains on with it.

    two_gpu_fit.py agree|surprise

The second process may have less memory than the first, by torch's own limit. Under "surprise" it
asks in its third trial for more than there is, while the first one waits for its gradients. Each
process prints what it found, and rank 0 the largest batch that both could take, by bisection.
"""

import gc
import json
import os
import sys

import torch
import torch.distributed as distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vramx
from vramx.errors import VramxError

WIDTH, LAYERS, STEPS = 1024, 6, 50
LIMITS = (4 << 30, 3 << 30)  # of the two processes
SURPRISE = 5  # steps in, when the third trial has begun


class Training:
    def __init__(self, rank: int, surprised: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).cuda()
        self.model = DistributedDataParallel(model, device_ids=[rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.is_surprised = surprised and rank == 1
        self.taken = 0

    def step(self, batch: int) -> None:
        self.taken += 1
        loss = self.model(torch.randn(batch, WIDTH, device="cuda")).square().mean()
        if self.is_surprised and self.taken == SURPRISE:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fits(self, batch: int, budget_bytes: int) -> bool:
        """Tell whether all processes stay within their budgets."""
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.step(batch)
        torch.cuda.synchronize()
        over = torch.tensor([torch.cuda.max_memory_allocated() > budget_bytes], device="cuda")
        self.optimizer.state.clear()
        gc.collect()
        torch.cuda.empty_cache()
        over = over.int()
        distributed.all_reduce(over)
        return not over.item()


def largest(training: Training, budget_bytes: int, near: int) -> int:
    """Return the largest batch that fits, of those from half of one that is near to a bit more."""
    low, high = near // 2, near + near // 16
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if training.fits(middle, budget_bytes) else (low, middle)
    return low


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    total = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMITS[rank] / total)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    training = Training(rank, sys.argv[1] == "surprise")
    try:
        found = vramx.fit_batch(training.step, timeout_s=60)
    except VramxError as error:
        print(json.dumps({"rank": rank, "said": f"{type(error).__name__}: {error}"}), flush=True)
        os._exit(0)  # the group is at an end, and with it what would wait for the other process
    facts = {"rank": rank, "batch": found.batch, "trials": len(found.attempts)}
    facts["largest"] = largest(training, found.budget_bytes, found.batch)
    for _ in range(STEPS):
        training.step(found.batch)
    torch.cuda.synchronize()
    print(json.dumps(facts), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
