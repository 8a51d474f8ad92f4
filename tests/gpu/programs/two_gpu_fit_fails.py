"""Has one of two processes run out of memory in a trial that the other is in the midst of.

Each process prints what it was told, and ends: the group is at an end.
"""

import json
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_gpu_tools import join

import vramx
from vramx.errors import VramxError

WIDTH, LAYERS = 1024, 6
LIMIT_BYTES = 4 << 30
FAILING = 5  # steps in, when the third trial has begun


class Training:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.rank = rank
        self.model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.taken = 0

    def step(self, batch: int) -> None:
        self.taken += 1
        loss = self.model(torch.randn(batch, WIDTH, device="cuda")).square().mean()
        if self.rank == 1 and self.taken == FAILING:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    rank = join()
    total = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
    said = "nothing"
    try:
        vramx.fit_batch(Training(rank).step, timeout_s=60)
    except VramxError as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps({"rank": rank, "said": said}), flush=True)
    os._exit(0)  # what would wait for the other process ends with it


if __name__ == "__main__":
    main()
