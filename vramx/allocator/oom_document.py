"""What the snapshot of a failed request says, in torch's own format and within a bound.

Where no history was recorded, torch's snapshot has segments and blocks alone, and nothing of the
request that failed. Its entry is added then, as torch would have recorded it, so that a reader
finds the request, its lines and what the device had free. Pure functions.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from vramx.sizes import MIB, format_size

MOST_BYTES = 64 * MIB  # a million events
_MOST_EVENTS = 500_000  # of a device; torch's own default has no bound
_MOST_FRAMES = 100
_TRIES = 6
# The newest that every reader of torch's snapshots knows.
_PROTOCOL = 4

Frame = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """A request that failed; `stack` has the lines of Python behind it, the innermost first."""

    device: int
    size_bytes: int
    device_free_bytes: int
    stack: list[Frame]


def stack_of(frame: FrameType | None) -> list[Frame]:
    """Return the lines of Python that led to a frame, the innermost first."""
    stack: list[Frame] = []
    while frame is not None and len(stack) < _MOST_FRAMES:
        code = frame.f_code
        stack.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return stack


def pickled(snapshot: dict[str, Any], failure: Failure) -> bytes:
    """Return a snapshot of torch's, completed by the failure, as a pickle within the bound.

    The oldest events are left out first, as a shorter ring would have.

    Raises:
        OSError: segments alone take more.
    """
    traces = [list(trace) for trace in snapshot.get("device_traces", ())]
    traces += [[] for _ in range(failure.device + 1 - len(traces))]
    _add_failure(traces[failure.device], failure)
    most = _MOST_EVENTS
    for _ in range(_TRIES):
        document = {**snapshot, "device_traces": [trace[-most:] for trace in traces]}
        data = pickle.dumps(document, protocol=_PROTOCOL)
        if len(data) <= MOST_BYTES:
            return data
        longest = max(min(len(trace), most) for trace in traces)
        most = max(longest * MOST_BYTES // (2 * len(data)), 1)
    raise OSError(f"it takes {format_size(len(data))}, more than {format_size(MOST_BYTES)}")


def _add_failure(trace: list[dict[str, Any]], failure: Failure) -> None:
    # Other threads go on while this one fails, so the entry need not be the last.
    if any(
        entry.get("action") == "oom" and entry.get("size") == failure.size_bytes
        for entry in reversed(trace)
    ):
        return
    trace.append(
        {
            "action": "oom",
            "device_free": failure.device_free_bytes,
            "size": failure.size_bytes,
            "stream": 0,
            "time_us": time.time_ns() // 1000,
            "pool_id": (0, 0),
            "compile_context": "N/A",
            "user_metadata": "",
            "frames": failure.stack,
        }
    )
