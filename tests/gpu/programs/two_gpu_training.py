"""Trains on two GPUs, one process each, under torchrun.

    two_gpu_training.py native|vramx ddp|fsdp

Rank 0 prints the losses of each step, exactly, and the peak of what each rank reserved.
"""

import json
import sys

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_gpu_tools import blocks, gathered, group

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

WIDTH = 2048
LAYERS = 6
STEPS = 8
# Rows of each step, different ones in turn, as batches of sequences are.
ROWS = (512, 3000, 1024, 4096)


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


def main(rank: int) -> None:
    model = blocks(LAYERS, WIDTH, 2 * WIDTH)
    losses = train({"ddp": replicated, "fsdp": sharded}[sys.argv[2]](model, rank), rank)
    peaks = gathered(torch.cuda.max_memory_reserved())
    if rank == 0:
        backend = torch.cuda.get_allocator_backend()
        print(json.dumps({"backend": backend, "losses": losses, "peaks": peaks}), flush=True)


if __name__ == "__main__":
    with group() as rank:
        main(rank)
