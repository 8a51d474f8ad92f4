"""A history of the CPU's storages for vramx.record: what a GPU's would be, of real small trainings.

A dispatch mode sees the results of every operation and logs their storages until they die. It sees
what was there before the recording only when it is used; that is left out until it ends, as a ring
that starts late leaves it out. The clock is one of its own: another zero, and another speed.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vramx.memory.history import TICK_BYTES, Tick, clock_ns
from vramx.memory.tensors import plain_tensors

_TICK_ADDRESS = 64  # of no storage
FRAMES = [{"name": "step", "filename": "train.py", "line": 7}]


class CpuHistory(TorchDispatchMode):
    """Records storages from start() to finish(); may be asked what is live meanwhile."""

    device_type = "cpu"

    def __init__(
        self, speed: float = 1.0, workspaces: tuple[int, ...] = (), last: int | None = None
    ) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self.live: dict[int, int] = {}  # address: bytes
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._speed, self._zero = speed, clock_ns()
        self._workspaces, self._last = workspaces, last
        self._epoch_us = time.time_ns() // 1000
        self._is_on = False

    def start(self, max_entries: int, stacks: str) -> None:
        self.options = max_entries, stacks
        self._is_on = True
        self.__enter__()

    def tick(self) -> Tick | None:
        begin_ns = clock_ns()
        self._log("alloc", _TICK_ADDRESS, TICK_BYTES, frames=FRAMES)
        tick = Tick(begin_ns, clock_ns(), self._now_us() * 1000, _TICK_ADDRESS)
        for action in ("free_requested", "free_completed"):
            self._log(action, _TICK_ADDRESS, TICK_BYTES)
        return tick

    def finish(self) -> dict[str, Any]:
        self.__exit__(None, None, None)
        self._is_on = False
        entries = self.entries if self._last is None else self.entries[-self._last :]
        return {
            "segments": [_segment(address, size) for address, size in self.live.items()],
            "device_traces": [list(entries)],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def workspace_sizes(self) -> tuple[int, ...]:
        return self._workspaces

    def outside_bytes(self) -> list[int]:
        return [12345]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # of torch.tensor, which is new
            for leaf in tree_leaves((args, kwargs)):
                self._see(leaf, is_new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._see(leaf, is_new=True)
        return result

    def _see(self, leaf: Any, *, is_new: bool) -> None:
        for tensor in plain_tensors(leaf):
            self._see_plain(tensor, is_new=is_new)

    def _see_plain(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key, address, size = id(storage), storage.data_ptr(), storage.nbytes()
        if not size or key in self._refs:
            return
        self._refs[key] = weakref.ref(storage, lambda _: self._forget(key, address, size))
        self.live[address] = size
        if is_new:
            self._log("alloc", address, size, frames=FRAMES)

    def _forget(self, key: int, address: int, size: int) -> None:
        del self._refs[key]
        if not self._is_on:
            return
        del self.live[address]
        self._log("free_requested", address, size)
        self._log("free_completed", address, size)

    def _log(self, action: str, address: int, size: int, **more: Any) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": 0}
        self.entries.append({**entry, "time_us": self._now_us(), **more})

    def _now_us(self) -> int:
        return self._epoch_us + int((clock_ns() - self._zero) * self._speed / 1000)


def _segment(address: int, size: int) -> dict[str, Any]:
    block = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": FRAMES,
    }
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }
