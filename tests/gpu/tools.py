"""What the tests of this package share: settling a process, bounding it, numbers that are exact."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import vramx
from vramx.allocator.install import current

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# What both allocators round a request up to.
UNIT = 512
# Cycles of torch.cuda._sleep that outlast any host code that a test runs meanwhile: about a
# quarter of a second at 2 GHz, and longer on a slower clock.
LONG_SLEEP = 500_000_000


def settle() -> None:
    """Wait for the device and give back what is cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def core_violation() -> str:
    """Return the first broken invariant of vramx's core in this process, or an empty text."""
    if not vramx.allocator_installed():
        return ""

    core = current().devices
    broken = ((device, core.check(device)) for device in core.started())
    return next((f"device {device}: {text}" for device, text in broken if text), "")


@contextmanager
def room(size_bytes: int) -> Iterator[None]:
    """Let this process hold `size_bytes` more than it holds now, and no more."""
    settle()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Have torch raise where the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def failure_of(action: Callable[[], object]) -> Exception:
    """Return the error of an action that runs out of memory, without the frames that hold it."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        action()
    return caught.value.with_traceback(None)


def block(size_bytes: int, value: int | None = None) -> torch.Tensor:
    """Return a tensor of so many bytes, each of them `value`, or as they come."""
    if value is None:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    return torch.full((size_bytes,), value, dtype=torch.uint8, device="cuda")


def on(device: int, size_bytes: int, value: int) -> torch.Tensor:
    """Return a block of one of several GPUs."""
    return torch.full((size_bytes,), value, dtype=torch.uint8, device=f"cuda:{device}")


def holds(tensor: torch.Tensor, value: int) -> bool:
    """Say whether every element is `value`. Allocates no more than a byte for each element."""
    return bool((tensor == value).all())


def overwrite(begin: int, size_bytes: int) -> list[torch.Tensor]:
    """Fill new tensors with 2 on the current stream, until one lies where the freed one lay."""
    taken = []
    for _ in range(8):
        taken.append(block(size_bytes, 2))
        if abs(taken[-1].data_ptr() - begin) < size_bytes:
            break
    return taken


def captured(
    work: Callable[[], Any], warm_ups: int = 1, **options: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture `work` after it was done on a stream of its own; return the graph and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = work()
    return graph, result


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return floats that are small integers: sums of products of them are exact in any order.

    Below 2**24 float32 represents every integer, so two ways to compute the same sum agree bit
    for bit, and results are compared with torch.equal.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randint(-2, 3, shape, generator=generator, device="cuda")
    return values.to(torch.float32)


def integer_network(width: int, seed: int = 0) -> torch.nn.Module:
    """Return two linear layers with a ReLU between, whose parameters are small integers."""
    layers = torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    network = torch.nn.Sequential(*layers).cuda()
    with torch.no_grad():
        for index, parameter in enumerate(network.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=seed + index))
    return network


def counters() -> dict[str, Any]:
    """Return torch.cuda.memory_stats() of the current device."""
    return dict(torch.cuda.memory_stats())
