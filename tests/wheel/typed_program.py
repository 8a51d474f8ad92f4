"""A user's program in which every expression of vramx has the type that stands here.

mypy reads it, nothing runs it: `Any` would pass as any type, but not in assert_type().
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import vramx


@vramx.compressed_activations
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))

    def width(self) -> int:
        return self.layer.in_features


@vramx.compressed_activations(level="int4")
def feed(x: Tensor, scale: float) -> Tensor:
    return x * scale


@vramx.track("step")
def step(batch: int) -> float:
    return float(batch)


block, x = Block(8), torch.ones(2, 8)
assert_type(block, Block)
assert_type(block.width(), int)
assert_type(feed(x, 2.0), Tensor)
assert_type(step(3), float)
assert_type(vramx.compressed_activations(block), Block)

# The allocator.
assert_type(vramx.install_allocator(limit="22GiB"), torch.cuda.memory.CUDAPluggableAllocator)
assert_type(vramx.allocator_installed(), bool)
assert_type(vramx.allocator_stats(), vramx.AllocatorStats)
assert_type(vramx.allocator_stats(0).allocated_bytes, int)
assert_type(vramx.defragment(), vramx.DefragmentReport)

# Compression.
with vramx.compress("int8", min_bytes=0) as stats:
    assert_type(stats, vramx.CompressionStats)
    assert_type(stats.kept_bytes, int)
assert_type(vramx.compressed_graphs(), AbstractContextManager[None])
assert_type(vramx.compression_stats(block), vramx.CompressionStats)
assert_type(vramx.checkpoint(feed, x, 2.0, level="int8"), Tensor)
assert_type(vramx.checkpoint_modules(block, where=nn.Linear), vramx.Report)
assert_type(vramx.optimize(block), vramx.OptimizeReport)
assert_type(vramx.report(block), vramx.Report)
assert_type(vramx.restore(block), vramx.Report)

# Plans and optimizers.
optimizer = torch.optim.AdamW(block.parameters())
assert_type(vramx.offload_optimizer(optimizer), torch.optim.AdamW)
plan = vramx.plan(block, x, "24GiB", optimizer=optimizer)
assert_type(plan, vramx.Plan)
assert_type(plan.apply(), vramx.Plan)
assert_type(plan.needed_bytes, int)
assert_type(vramx.predict(step, 3), vramx.Prediction)
fit = vramx.fit_batch(step, budget="24GiB")
assert_type(fit, vramx.BatchFit)
assert_type(fit.batch, int)

# Seeing memory.
with vramx.track("forward") as tracked:
    assert_type(tracked, vramx.Tracked)
assert_type(tracked.peak_bytes, int)
with vramx.record("run.pickle", block, optimizer) as recorder:
    assert_type(recorder, vramx.Recorder)
snapshot = vramx.Snapshot.load("run.pickle")
assert_type(snapshot, vramx.Snapshot)
result = vramx.replay(vramx.load_trace("run.pickle"))[0]
assert_type(result.peak_reserved_bytes, int)
assert_type(vramx.__version__, str)
