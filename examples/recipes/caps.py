"""Caps: a share of the GPU for each program, and what a program needs to run inside it.

python caps.py [--variant NAME] [--small]
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from common import Figures, Place, UnavailableError, install, main, train_varying

TEXTS = 24
ROOM = 1.05  # the cap, in what the program has alive at its peak


def torch_allocator(place: Place) -> Figures:
    place.needs_gpu("a cap")
    return capped(place)


def vramx_allocator(place: Place) -> Figures:
    place.needs_gpu("a cap")
    install(place)
    return capped(place)


def host(_place: Place) -> Figures:
    """Say what a container leaves for pinned memory: it counts as the container's own."""
    limit_bytes = host_limit_bytes()
    if limit_bytes is None:
        raise UnavailableError("the cap of a host needs a container that has one")
    return {"host_limit_bytes": limit_bytes}


def host_limit_bytes() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(name).exists():
            limit = Path(name).read_text().strip()
            return None if limit == "max" else int(limit)
    return None


def capped(place: Place) -> Figures:
    """Train on texts of varying lengths, then again under a cap of ROOM times the peak."""
    train_varying(place, TEXTS)
    gc.collect()
    alive = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    cap(ROOM * alive)
    try:
        figures = train_varying(place, TEXTS) | {"fits": 1}
    except torch.OutOfMemoryError:
        figures = {"fits": 0}
    return figures | {"cap_bytes": int(ROOM * alive)}


def cap(size_bytes: float) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size_bytes / total)


VARIANTS = {"torch_allocator": torch_allocator, "vramx_allocator": vramx_allocator, "host": host}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
