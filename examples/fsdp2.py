"""FSDP2 on every GPU of a machine, with fused blocks that keep int8: optimise first, shard then.

What it shows: `vramx.optimize(model)` swaps the blocks before `fully_shard` wraps them; parameters,
their names and `state_dict` stay, so sharding, checkpoints and clipping are as without. All
processes must do the same to the model, which is checked by what optimize reports. Each process
installs the allocator for its own GPU.
What to expect: on GPUs the same steps are taken as the model is and then optimised; the peak of
each process falls by what its blocks no longer keep. Without GPUs two processes of this machine do
the same over gloo, and the report says what was done.
Needs: torch, one GPU or more. Started without torchrun it starts itself with it, a process a GPU.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    python examples/fsdp2.py
"""

from __future__ import annotations

import argparse
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import vramx


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="FSDP2 with fused blocks")
    parser.add_argument("--layers", type=int, default=12 if has_gpu else 2)
    parser.add_argument("--width", type=int, default=1024 if has_gpu else 32)
    parser.add_argument("--tokens", type=int, default=1024 if has_gpu else 16, help="of a row")
    parser.add_argument("--steps", type=int, default=5 if has_gpu else 3)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        count = torch.cuda.device_count() if has_gpu else 2
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])

    if has_gpu:
        vramx.install_allocator()  # before anything uses the GPU, set_device included
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if has_gpu else "cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()
    plain = None
    if has_gpu:
        plain = train("as it is", build(args, device, level=None), args, device)
        gc.collect()  # FSDP's hooks and modules refer to each other
        torch.cuda.empty_cache()
    model = build(args, device, level="int8")
    optimised = train("optimised", model, args, device)
    if rank == 0:
        print(vramx.report(model))
    if plain is not None:
        saved = plain.peak_bytes - optimised.peak_bytes
        print(f"rank {rank}: {plain}")
        print(f"rank {rank}: {optimised}")
        print(f"rank {rank}: saved at the peak: {saved / 2**20:,.0f} MiB")
    dist.destroy_process_group()


def build(args: argparse.Namespace, device: torch.device, level: str | None) -> nn.Module:
    """Make the same model in each process, and shard it block by block."""
    torch.manual_seed(0)
    layers = (
        nn.TransformerEncoderLayer(
            args.width, 4, 4 * args.width, dropout=0.0, activation="gelu", batch_first=True
        )
        for _ in range(args.layers)
    )
    model = nn.Sequential(*layers).to(device)
    if level is not None:
        report = vramx.optimize(model, level)  # before fully_shard
        words = {row.name: row.done for row in report.rows}
        of_all: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_all, words)
        assert all(each == words for each in of_all), "the processes have optimised differently"
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def train(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device
) -> vramx.Tracked:
    """Take steps on rows of this process's own; return what memory they took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with vramx.track(name, synchronize=True) as memory:
        for step in range(args.steps):
            rows = torch.randn(8, args.tokens, args.width, generator=generator).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = (model(rows) - rows.flip(2)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            del rows
            if dist.get_rank() == 0:
                print(f"{name}, step {step}: loss {loss.item():.4f}")
            del loss
    return memory


if __name__ == "__main__":
    main()
