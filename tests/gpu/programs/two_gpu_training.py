"""Trains on two GPUs, one process each, under torchrun.

    two_gpu_training.py native|vramx ddp|fsdp

Rank 0 prints the losses of each step, exactly, and the peak of what each rank reserved.
"""

import json
import os
import sys

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

WIDTH = 2048
LAYERS = 6
STEPS = 8
# Rows of each step, different ones in turn, as batches of sequences are.
ROWS = (512, 3000, 1024, 4096)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def replicated(model: nn.Sequential, rank: int) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)


def sharded(model: nn.Sequential, rank: int) -> nn.Module:
    """Shard each block, and gather two of them ahead in both directions."""
    blocks = list(model)
    for each in blocks:
        fully_shard(each)
    fully_shard(model)
    for index, each in enumerate(blocks):
        each.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        each.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    return model


def train(model: nn.Module, rank: int) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device="cuda").manual_seed(100 + rank)
    losses = []
    for step in range(STEPS):
        rows = ROWS[step % len(ROWS)]
        x = torch.randn(rows, WIDTH, generator=generator, device="cuda")
        loss = (model(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        losses.append(total.item().hex())
    return losses


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).cuda()
    losses = train({"ddp": replicated, "fsdp": sharded}[sys.argv[2]](model, rank), rank)
    peaks: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(peaks, torch.cuda.max_memory_reserved())
    if rank == 0:
        backend = torch.cuda.get_allocator_backend()
        print(json.dumps({"backend": backend, "losses": losses, "peaks": peaks}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
