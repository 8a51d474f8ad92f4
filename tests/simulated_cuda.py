"""torch.cuda's counters, told by simulated devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import CAPACITY, open_device


class Cuda:
    """torch.cuda's counters, of one simulated device for each number."""

    def __init__(self, patch: pytest.MonkeyPatch, capacity_bytes: int = CAPACITY) -> None:
        self.devices = [open_device(capacity_bytes) for _ in range(2)]
        self.current = 0
        self.initialised = True
        self.waits: list[Any] = []
        patch.setattr(torch.cuda, "is_initialized", lambda: self.initialised)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        patch.setattr(torch.cuda, "synchronize", self.waits.append)

    def stats(self, device: int) -> dict[str, Any]:
        stats: dict[str, Any] = dict(self.devices[device].stats())
        return {**stats, "reserved_bytes": {"all": stats["reserved_bytes"]}}

    def reset(self, device: int) -> None:
        self.devices[device].reset_peak_stats()

    def take(self, size: int, device: int | None = None) -> int:
        return self.devices[self.current if device is None else device].allocate(size)

    def give(self, address: int) -> None:
        self.devices[self.current].free(address)

    def spike(self, size: int) -> None:
        self.give(self.take(size))
