"""Small inputs that several tests build on, and the one way in which the command line refuses."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from vramx.memory.trace import Trace

SMALL = "offload_streams.npz"
_TESTS = Path(__file__).resolve().parent
SNAPSHOTS = {
    "train": _TESTS / "snapshots" / "train.pickle.gz",
    "oom": _TESTS.parent / "examples" / "data" / "oom.pickle.gz",
}
Event = dict[str, Any]
START_US = 1_795_207_576_168_327


def event(action: str, addr: int, size: int, at_us: int = 0, stream: int = 0) -> Event:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": stream,
        "time_us": START_US + at_us,
        "frames": [],
    }


def segment(*blocks: Event, device: int = 0, stream: int = 0) -> Event:
    return {
        "device": device,
        "address": 0x1000,
        "total_size": sum(block["size"] for block in blocks),
        "stream": stream,
        "segment_pool_id": (0, 0),
        "blocks": list(blocks),
    }


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> Event:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


def small_trace() -> dict[str, Any]:
    """Two allocations, the first of them freed."""
    return {
        "op": np.array([0, 0, 1, 2], np.uint8),
        "id": np.array([0, 1, 0, 0], np.uint32),
        "size": np.array([512, 1024, 512, 512], np.uint64),
        "stream": np.zeros(4, np.uint8),
        "t": np.array([0, 5, 9, 9], np.uint32),
    }


class Recorder:
    """Builds the arrays of a trace, one event every 10 us."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, int, int]] = []
        self.sizes: list[int] = []
        self.streams: list[int] = []

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        self.sizes.append(size_bytes)
        self.streams.append(stream)
        self._add(0, len(self.sizes) - 1)
        return len(self.sizes) - 1

    def free(self, allocation: int) -> None:
        self._add(2, allocation)

    def _add(self, op: int, allocation: int) -> None:
        self.events.append((op, allocation, self.sizes[allocation], self.streams[allocation]))

    def arrays(self) -> dict[str, Any]:
        columns = zip(*self.events, strict=True)
        types = {"op": np.uint8, "id": np.uint32, "size": np.uint64, "stream": np.uint8}
        arrays = {
            name: np.array(column, dtype)
            for (name, dtype), column in zip(types.items(), columns, strict=True)
        }
        return {**arrays, "t": np.arange(len(self.events), dtype=np.uint32) * 10}


def rows(trace: Trace) -> list[tuple[int, ...]]:
    """Return (op, id, size, stream, time) for each event."""
    return [
        tuple(int(value) for value in row) for row in zip(*trace.arrays().values(), strict=True)
    ]


def live_bytes(trace: Trace) -> Any:
    """Return the live bytes after each event."""
    sign = np.where(trace.op == 0, 1, np.where(trace.op == 2, -1, 0))
    return (sign * trace.size.astype(np.int64)).cumsum()


def assert_one_line_refusal(code: int, out: str, err: str, what: str) -> None:
    assert code == 2
    assert out == ""
    assert err.startswith(("vramx ", "vramx: "))
    assert err.endswith("\n")
    assert err.count("\n") == 1
    # From Python 3.12 on argparse names choices without quotation marks.
    assert what.replace("'", "") in err.replace("'", "")


def recorded_snapshot(name: str) -> bytes:
    """Return a snapshot that torch wrote on a GPU, of SNAPSHOTS; "oom" is of a failure."""
    return gzip.decompress(SNAPSHOTS[name].read_bytes())
