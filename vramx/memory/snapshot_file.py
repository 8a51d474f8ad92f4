"""Reads the file of a torch memory snapshot into plain data, and checks single fields of it.

A pickle or JSON, either of them also gzipped; nothing in the file is run. What the data says is
snapshot_reader's to understand.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from vramx.errors import TraceError, brief
from vramx.memory.plain_pickle import PICKLE_MAGIC, load_plain_pickle

# Eight million events; unpacked, for a compressed file.
MAX_FILE_BYTES = 512 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_NO_SNAPSHOT = "it is no torch memory snapshot"
_END = 1 << 64
MOST_BYTES = 1 << 48  # of one allocation, as in the core; no device has as much


def read_snapshot_file(path: Path) -> dict[str, Any]:
    """Return the snapshot's dictionary, with 'segments' and 'device_traces' in it.

    Raises:
        TraceError: the file is neither pickle nor JSON, is damaged, or asks for code.
    """
    snapshot = _parse(_read_bytes(path))
    if isinstance(snapshot, list):  # torch before 2.0, and memory_snapshot(include_traces=False)
        snapshot = {"segments": snapshot}
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        raise TraceError(f"{_NO_SNAPSHOT}: no dictionary with 'segments' and 'device_traces'")
    return {"device_traces": [], **snapshot}


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"the gzip file is damaged or cut short ({error})") from None
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TraceError(f"it is larger than the {MAX_FILE_BYTES >> 20} MiB accepted")
    return data


def _parse(data: bytes) -> Any:
    if data.startswith(PICKLE_MAGIC):
        return load_plain_pickle(data)
    if data.lstrip()[:1] not in (b"{", b"["):
        raise TraceError(
            "it is neither a pickle nor JSON; a trace (.npz) or a torch snapshot is accepted"
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise TraceError(f"it is no complete JSON ({str(error)[:80]})") from None


def events_of_device(
    snapshot: dict[str, Any], device: int | None
) -> tuple[int, list[Any] | tuple[Any, ...]]:
    """Return a device's ordinal and its events.

    Args:
        device: its ordinal; by default that of the device on which a request failed, and of the
            one with the most events among those, or among all.

    Raises:
        TraceError: no device has events, or not the one asked for.
    """
    traces = as_list(snapshot["device_traces"], "device_traces")
    counts = [len(as_list(trace, f"device_traces[{i}]")) for i, trace in enumerate(traces)]
    with_events = [i for i, count in enumerate(counts) if count]
    if not with_events:
        raise TraceError(
            "the snapshot holds no events; start torch.cuda.memory._record_memory_history() "
            "before the run to record them"
        )
    if device is None:
        device = max(with_events, key=lambda i: (_ran_out(traces[i]), counts[i]))
    if device not in with_events:
        listed = ", ".join(map(str, with_events))
        raise TraceError(
            f"the snapshot holds no events of device {brief(device)}; it has them of {listed}"
        )
    events: list[Any] | tuple[Any, ...] = traces[device]
    return device, events


def _ran_out(events: list[Any] | tuple[Any, ...]) -> bool:
    return any(type(event) is dict and event.get("action") == "oom" for event in events)


def as_list(value: Any, what: str) -> list[Any] | tuple[Any, ...]:
    """Return a value that must be a list."""
    if not isinstance(value, (list, tuple)):
        raise TraceError(f"{_NO_SNAPSHOT}: {what} is {type(value).__name__}, not a list")
    return value


def field(record: Any, key: str, what: str, index: int) -> Any:
    """Return a field that must be there; `what` and `index` name the record in an error."""
    if not isinstance(record, dict):
        raise TraceError(
            f"{_NO_SNAPSHOT}: {what} {index} is {type(record).__name__}, not a dictionary"
        )
    if key not in record:
        raise TraceError(f"{what} {index} has no {key!r}")
    return record[key]


def number(record: Any, key: str, what: str, index: int) -> int:
    """Return a field that must be an integer from 0 to 2^64 - 1."""
    # Asked three times an event: the sound case comes first.
    value = record.get(key) if type(record) is dict else None
    if type(value) is int and 0 <= value < _END:
        return value
    value = field(record, key, what, index)
    raise TraceError(
        f"{what} {index} has {key} {repr(value)[:40]}; an integer from 0 to 2^64 - 1 is accepted"
    )


def number_or(default: int, record: dict[str, Any], key: str, what: str, index: int) -> int:
    """Return a field that may be absent."""
    return number(record, key, what, index) if key in record else default


def byte_count(record: Any, key: str, what: str, index: int) -> int:
    """Return a field that must be a size which a device could have."""
    size = number(record, key, what, index)
    if size > MOST_BYTES:
        raise TraceError(f"{what} {index} has {key} {size}; at most 2^48 is accepted")
    return size
