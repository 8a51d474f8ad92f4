"""Uses most of what allocates, frees all of it, and tells what is left.

everything_back.py native|vramx
"""

import contextlib
import gc
import json
import sys

import torch

core = None
if sys.argv[1] == "vramx":
    import vramx
    from vramx.allocator.install import current

    vramx.install_allocator()
    core = current().devices


def train() -> None:
    network = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4)),
        *(torch.nn.Flatten(), torch.nn.Linear(256, 10)),
    ).cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    for batch in (4, 32, 8):
        network(torch.randn(batch, 3, 48, 48, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def use_streams() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    x.record_stream(side)
    y.record_stream(torch.cuda.current_stream())


def use_pools() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(1 << 20, device="cuda")
    with torch.cuda.graph(graph):
        output = x + 1
    graph.replay()
    assert output.sum().item() == 2 << 20


def run_out_of_memory() -> None:
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


for step in (train, use_streams, use_pools, run_out_of_memory):
    step()
keys = sorted(torch.cuda.memory_stats())
gc.collect()
torch.cuda.synchronize()
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
facts = {
    "keys": keys,
    "allocated": torch.cuda.memory_allocated(),
    "reserved": torch.cuda.memory_reserved(),
    "segments": len(torch.cuda.memory_snapshot()),
    "violation": core.check(0) if core else "",
}
print(json.dumps(facts))
