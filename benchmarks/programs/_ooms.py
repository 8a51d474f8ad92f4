"""Programs that run out of memory, each in a way of its own: what benchmarks/seeing.py provokes.

    python _ooms.py KIND [--limit BYTES] [--record FILE]

Each takes some 2 GiB, and most where it would run out: what is asked for last is what does not fit.
Nearly all of what they allocate has 10.1 MiB, of which torch's allocator makes 12, so that another
allocator gets by with less. Nothing in them knows vramx.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

MIB = 1 << 20
SIDE = 1627  # of a matrix of floats with 10.1 MiB
LAYERS = 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--record")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.cuda.init()
    with recorded(args.record), bounded(args.kind, args.limit):
        kept = KINDS[args.kind]()  # until all is recorded
    del kept


@contextlib.contextmanager
def recorded(path: str | None) -> Iterator[None]:
    """Write torch's own history of all that follows, in the rank that is to run out of memory."""
    if path is None or os.environ.get("RANK", "1") != "1":
        yield
        return
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    yield
    torch.cuda.memory._dump_snapshot(path)


@contextlib.contextmanager
def bounded(kind: str, limit_bytes: int | None) -> Iterator[None]:
    """Have no more than a limit, by torch's own setting or because another process has the rest."""
    if limit_bytes is None:
        yield
    elif kind == "another_process":
        torch.empty(1, device="cuda")  # CUDA's context, before the rest is taken
        torch.cuda.empty_cache()
        command = [sys.executable, __file__, HOLD, "--limit", str(limit_bytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            try:
                yield
            finally:
                other.kill()
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
        yield


def hold_the_rest() -> None:
    """Hold all of a GPU but a limit until the other process ends; by the driver alone."""
    cuda, left = ctypes.CDLL("libcuda.so.1"), int(sys.argv[3])
    context, held = ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for code in (
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(free.value - left)),
    ):
        if code:
            raise SystemExit(f"the driver says {code}")
    print("held", flush=True)
    sys.stdin.read()


# --- kinds ----------------------------------------------------------------------------------------


def matrix() -> Tensor:
    return torch.empty(SIDE, SIDE, device="cuda")


def layers(count: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(count))).cuda()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    out: Tensor = model(torch.randn(SIDE, SIDE, device="cuda"))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out


def fragmentation() -> None:
    """Buffers of all sizes come and go; then one is asked for that is larger than any."""
    chosen, kept = random.Random(7), list[Tensor]()
    for _ in range(600):
        size = chosen.randrange(MIB, 40 * MIB)
        kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if len(kept) > 70:
            del kept[chosen.randrange(len(kept))]
    kept.append(torch.empty(600 * MIB, dtype=torch.uint8, device="cuda"))


def lengths() -> None:
    """Batches of random lengths, and a longest one at the end."""
    model, chosen = layers(12), random.Random(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for length in [*(chosen.randrange(200, 4 * SIDE) for _ in range(12)), 5 * SIDE]:
        model(torch.randn(length, SIDE, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def leak() -> None:
    """A list of what each step made, for a plot that nobody draws."""
    model = layers(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    made = [trained(model, optimizer).detach() for _ in range(120)]
    assert len(made) == 120


def loss_spike() -> None:
    """A head of many classes, whose loss makes floats of its logits, and their gradients."""
    model, head = layers(), nn.Linear(SIDE, 8 * SIDE, bias=False).cuda()
    labels = torch.randint(0, 8 * SIDE, (SIDE,), device="cuda")
    for _ in range(2):
        scores = head(model(torch.randn(SIDE, SIDE, device="cuda")))
        cross_entropy(scores.float(), labels).backward()
        for parameter in (*model.parameters(), *head.parameters()):
            parameter.grad = None


def first_step() -> None:
    """The optimizer makes its states when it first steps."""
    model = layers(40)
    trained(model, torch.optim.AdamW(model.parameters(), fused=True))


def evaluation() -> None:
    """An evaluation of larger batches, that nobody has put under no_grad()."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        trained(model, optimizer)
    parts = [model(torch.randn(SIDE, SIDE, device="cuda")) for _ in range(5)]
    print(float(sum(part.square().mean() for part in parts)))


def growing_cache() -> None:
    """Keys and values of each layer, a token longer at a time and copied each time."""
    caches = [torch.empty(0, 8, 256, device="cuda") for _ in range(16)]
    for _ in range(150):
        for index, cache in enumerate(caches):
            new = torch.empty(60, 8, 256, device="cuda")
            caches[index] = torch.cat([cache, new])
            del cache


def buffers() -> None:
    """So many buffers that not all of them fit."""
    kept = [matrix() for _ in range(160)]
    assert len(kept) == 160


def pool() -> torch.cuda.MemPool:
    """What a pool was made for is gone; the pool still has the memory, and nothing else gets it.

    Before torch 2.12 a recording knows an allocation's pool by its segment, so the pool has to be
    there when the recording is written: else its memory counts as the cache's, and 480 MiB less
    seem to be needed than are.
    """
    own = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(own):
        scratch = [matrix() for _ in range(40)]
    del scratch
    buffers()
    return own


def rank() -> None:
    """Of two processes one has more to do than the other."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name need not be known to it
    torch.distributed.init_process_group("gloo")
    kept = [matrix() for _ in range(20 + 140 * torch.distributed.get_rank())]
    torch.distributed.barrier()
    assert kept
    torch.distributed.destroy_process_group()


HOLD = "hold_the_rest"
KINDS: dict[str, Callable[[], Any]] = {
    "fragmentation": fragmentation,
    "lengths": lengths,
    "leak": leak,
    "loss_spike": loss_spike,
    "first_step": first_step,
    "evaluation": evaluation,
    "growing_cache": growing_cache,
    "limit": buffers,
    "another_process": buffers,
    "pool": pool,
    "rank": rank,
}

if __name__ == "__main__":
    if sys.argv[1:2] == [HOLD]:
        hold_the_rest()
    else:
        main()
