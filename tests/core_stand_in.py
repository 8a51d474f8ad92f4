"""A stand-in for vramx._core with its interface: the same checks, an allocator that never wastes.

It lets the Python side be tested without a compiler. `live` is exact; every other policy is the
live bytes rounded up to 2 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

CHUNK_BYTES = 2 << 20
MAX_SIZE = 1 << 48
CALLS = ("create", "map", "set_access", "unmap", "release")


def probe_cuda() -> dict[str, Any]:
    return {"error": "no driver", "driver_version": 0, "devices": []}


class Replay:
    def __init__(self, op: Any, allocation: Any, size: Any, stream: Any, time_us: Any) -> None:
        if len({len(op), len(allocation), len(size), len(stream), len(time_us)}) != 1:
            raise ValueError("the arrays have unequal lengths")
        _check_events(op, allocation, size)
        change = np.where(op == 0, 1, np.where(op == 2, -1, 0)) * size.astype(np.int64)
        self._live = change.cumsum()
        self._time_us = time_us
        self._op, self._id, self._size = op, allocation, size
        self.events = int(np.count_nonzero(op != 1))
        self.peak_live_bytes = int(self._live.max())
        self.peak_event = int(self._live.argmax())
        self.trace_us = float(time_us[-1])

    def run(
        self,
        policy: str,
        capacity_bytes: int = 0,
        driver: str = "sim",
        device: int = 0,
        samples: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Any]:
        if driver == "cuda":
            raise RuntimeError("no CUDA device")
        if progress is not None:
            progress(self.events, self.events)
        reserved = self._live if policy == "live" else -(-self._live // CHUNK_BYTES) * CHUNK_BYTES
        over = np.flatnonzero(reserved > capacity_bytes) if capacity_bytes else np.array([], int)
        chunks = 0 if policy == "live" else int(reserved.max()) // CHUNK_BYTES
        return {
            "peak_reserved_bytes": int(reserved.max()),
            "peak_allocated_bytes": int(self._live.max()),
            "oom": bool(len(over)),
            "oom_event": int(over[0]) if len(over) else -1,
            "ns_per_event": 50.0,
            "driver_calls": dict.fromkeys(CALLS, chunks),
            "driver_us": 100.0 * chunks,
            "driver_us_second_half": 0.0,
            "retries": 0,
            "mismatches": 0,
            "host_bytes": 6400,
            "timeline": self._timeline(reserved, samples) if samples else None,
        }

    def min_capacity(self, policy: str, progress: Callable[[int, int], None] | None = None) -> int:
        return -(-self.peak_live_bytes // CHUNK_BYTES) * CHUNK_BYTES

    def layout(self, policy: str = "vramx", event: int = -1) -> list[dict[str, Any]]:
        end = (self.peak_event if event < 0 else event) + 1
        live: dict[int, int] = {}
        for op, allocation, size in zip(
            self._op[:end], self._id[:end], self._size[:end], strict=True
        ):
            if op == 0:
                live[int(allocation)] = int(size)
            elif op == 2:
                del live[int(allocation)]
        address, layout = 1 << 40, []
        for allocation, size in live.items():
            layout.append(
                {"address": address, "size": size, "kind": "block", "allocation": allocation}
            )
            address += size
        spare = -(address - (1 << 40)) % CHUNK_BYTES
        return [*layout, {"address": address, "size": spare, "kind": "free", "allocation": -1}]

    def _timeline(self, reserved: Any, samples: int) -> dict[str, Any]:
        bounds = np.linspace(0, len(reserved), samples, endpoint=False).astype(int)
        return {
            "time_us": self._time_us[bounds].astype(np.float64),
            "live_bytes": np.maximum.reduceat(self._live, bounds).astype(np.uint64),
            "reserved_bytes": np.maximum.reduceat(reserved, bounds).astype(np.uint64),
        }


def _check_events(op: Any, ids: Any, size: Any) -> None:
    allocated: set[int] = set()
    live: set[int] = set()
    for event, (kind, allocation, bytes_) in enumerate(
        zip(op.tolist(), ids.tolist(), size.tolist(), strict=True)
    ):
        if kind > 2:
            raise ValueError(f"event {event}: op {kind} is unknown")
        if bytes_ > MAX_SIZE:
            raise ValueError(f"event {event}: size {bytes_} is above 2^48")
        if kind == 0:
            if allocation in allocated:
                raise ValueError(f"event {event}: id {allocation} is allocated a second time")
            allocated.add(allocation)
            live.add(allocation)
        elif allocation not in allocated:
            raise ValueError(f"event {event}: free of the unknown id {allocation}")
        elif allocation not in live:
            raise ValueError(f"event {event}: id {allocation} is freed a second time")
        elif kind == 2:
            live.remove(allocation)
