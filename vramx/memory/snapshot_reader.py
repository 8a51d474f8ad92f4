"""Turns a torch memory snapshot (torch.cuda.memory._dump_snapshot) into a Trace.

A snapshot names memory by address and holds only the last events, so three things are put right:
addresses, which are reused, become allocation ids; memory that was allocated before the recording
began (freed later without an allocation, or still alive at the end without one) is allocated at
the start; streams, which are raw pointers, become 0, 1, ... in order of appearance. Memory counts
as reusable from `free_completed`. Private pools are not told apart.

The reader is tolerant, because the format gains fields with every torch: unknown keys and unknown
actions are passed over. It never runs anything in the file. About 1 s for 100 000 events.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from vramx.errors import TraceError
from vramx.memory.plain_pickle import PICKLE_MAGIC, load_plain_pickle
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, FREE_REQUESTED, Trace

# Eight million events; unpacked, for a compressed file.
MAX_FILE_BYTES = 512 << 20
_MAX_STREAMS = 256
_MAX_TIME_US = (1 << 32) - 1
_GZIP_MAGIC = b"\x1f\x8b"
_LIVE_STATES = frozenset(("active_allocated", "active_pending_free"))
_ROW = [("op", "u1"), ("key", "i8"), ("size", "u8"), ("stream", "u1"), ("time_us", "u8")]
_NO_SNAPSHOT = "it is no torch memory snapshot"


def load_snapshot_trace(path: Path, device: int | None = None) -> Trace:
    """Read a snapshot file: a pickle or JSON, either of them also gzipped.

    Args:
        device: the ordinal whose events are wanted; by default that with the most events.

    Raises:
        TraceError: the file is neither, is damaged, asks for code, or holds no events.
    """
    snapshot = _parse(_read_bytes(path))
    if isinstance(snapshot, list):  # torch before 2.0, and memory_snapshot(include_traces=False)
        snapshot = {"segments": snapshot, "device_traces": []}
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        raise TraceError(f"{_NO_SNAPSHOT}: no dictionary with 'segments' and 'device_traces'")
    traces = _list(snapshot.get("device_traces", []), "device_traces")
    chosen = _choose_device(traces, device)
    builder = _Builder()
    for position, entry in enumerate(traces[chosen]):
        builder.add(_Entry(entry, position))
    builder.add_survivors(_live_blocks(snapshot["segments"], chosen))
    return builder.finish(path.name, chosen)


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


def _choose_device(traces: list[Any], device: int | None) -> int:
    counts = [len(_list(trace, f"device_traces[{i}]")) for i, trace in enumerate(traces)]
    with_events = [i for i, count in enumerate(counts) if count]
    if not with_events:
        raise TraceError(
            "the snapshot holds no events; start torch.cuda.memory._record_memory_history() "
            "before the run to record them"
        )
    if device is None:
        return max(with_events, key=lambda i: counts[i])
    if device not in with_events:
        listed = ", ".join(map(str, with_events))
        raise TraceError(
            f"the snapshot holds no events of device {device}; it has them of {listed}"
        )
    return device


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise TraceError(f"{_NO_SNAPSHOT}: {what} is {type(value).__name__}, not a list")
    return list(value)


def _field(record: Any, key: str, where: str) -> Any:
    if not isinstance(record, dict):
        raise TraceError(f"{_NO_SNAPSHOT}: {where} is {type(record).__name__}, not a dictionary")
    if key not in record:
        raise TraceError(f"{where} has no {key!r}")
    return record[key]


def _number(record: Any, key: str, where: str) -> int:
    value = _field(record, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        shown = repr(value)[:40]
        raise TraceError(f"{where} has {key} {shown}; an integer from 0 to 2^64 - 1 is accepted")
    return value


class _Entry:
    """One event of a device's trace, its fields checked when they are asked for."""

    def __init__(self, record: Any, position: int) -> None:
        self._record = record
        self._where = f"event {position}"
        self.action = _field(record, "action", self._where)

    def number(self, key: str) -> int:
        return _number(self._record, key, self._where)

    def number_or_zero(self, key: str) -> int:
        return self.number(key) if key in self._record else 0


class _Block:
    """A live allocation while the events are read."""

    __slots__ = ("free_requested", "key", "size", "stream")

    def __init__(self, key: int, size: int, stream: int) -> None:
        self.key = key
        self.size = size
        self.stream = stream
        self.free_requested = False


class _Builder:
    """Follows the events by address and collects rows (op, key, size, stream, time).

    Keys count up from 0 for allocations seen and down from -1 for those that predate the
    recording, whose number is known only at the end; finish() turns both into ids.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Block] = {}
        self._rows: list[tuple[int, int, int, int, int]] = []  # as in _ROW
        self._baseline: list[_Block] = []
        self._streams: dict[int, int] = {0: 0}
        self._allocations = 0

    def add(self, entry: _Entry) -> None:
        if entry.action == "alloc":
            self._allocate(entry)
        elif entry.action == "free_requested":
            self._request_free(entry)
        elif entry.action == "free_completed":
            self._complete_free(entry)

    def add_survivors(self, blocks: list[tuple[int, int, int]]) -> None:
        """Take in the blocks alive at the end whose allocation was not recorded."""
        for address, size, stream in blocks:
            if address not in self._live:
                self._live[address] = self._predating(size, stream)

    def finish(self, name: str, device: int) -> Trace:
        if not self._rows:
            raise TraceError("the snapshot holds no allocation or free; at least one is needed")
        start_us = self._rows[0][4]
        seeds = [(ALLOCATE, b.key, b.size, b.stream, start_us) for b in self._baseline]
        rows = np.array(seeds + self._rows, _ROW)
        ids = np.where(rows["key"] < 0, -1 - rows["key"], rows["key"] + len(seeds))
        # The clock may step back, and 32 bits hold 71 minutes: later events share the last moment.
        elapsed_us = (rows["time_us"].astype(np.float64) - start_us).clip(0, _MAX_TIME_US)
        return Trace(
            name=name,
            op=rows["op"].copy(),
            id=ids.astype(np.uint32),
            size=rows["size"].copy(),
            stream=rows["stream"].copy(),
            time_us=np.maximum.accumulate(elapsed_us).astype(np.uint32),
            device=device,
        )

    def _allocate(self, entry: _Entry) -> None:
        address = entry.number("addr")
        if address in self._live:  # its free was not recorded (skip_actions)
            self._complete_free(entry)
        stream = self._stream_number(entry.number_or_zero("stream"))
        block = _Block(self._allocations, entry.number("size"), stream)
        self._allocations += 1
        self._live[address] = block
        self._append(ALLOCATE, block, entry)

    def _request_free(self, entry: _Entry) -> None:
        block = self._block_of(entry)
        if not block.free_requested:
            block.free_requested = True
            self._append(FREE_REQUESTED, block, entry)

    def _complete_free(self, entry: _Entry) -> None:
        self._request_free(entry)
        self._append(FREE_COMPLETED, self._live.pop(entry.number("addr")), entry)

    def _block_of(self, entry: _Entry) -> _Block:
        address = entry.number("addr")
        block = self._live.get(address)
        if block is None:  # allocated before the recording began
            block = self._predating(entry.number("size"), entry.number_or_zero("stream"))
            self._live[address] = block
        return block

    def _predating(self, size: int, stream: int) -> _Block:
        block = _Block(-1 - len(self._baseline), size, self._stream_number(stream))
        self._baseline.append(block)
        return block

    def _append(self, op: int, block: _Block, entry: _Entry) -> None:
        self._rows.append(
            (op, block.key, block.size, block.stream, entry.number_or_zero("time_us"))
        )

    def _stream_number(self, stream: int) -> int:
        number = self._streams.setdefault(stream, len(self._streams))
        if number >= _MAX_STREAMS:
            raise TraceError(f"the snapshot uses more than the {_MAX_STREAMS} streams accepted")
        return number


def _live_blocks(segments: Any, device: int) -> list[tuple[int, int, int]]:
    """Return (address, requested size, stream) of each block alive when the snapshot was taken."""
    blocks = []
    seen: set[int] = set()
    for index, segment in enumerate(_list(segments, "segments")):
        where = f"segment {index}"
        if isinstance(segment, dict) and segment.get("device", 0) != device:
            continue
        stream = _number(segment, "stream", where)
        address = _number(segment, "address", where)
        for block in _list(_field(segment, "blocks", where), f"blocks of {where}"):
            size = _number(block, "size", f"a block of {where}")
            if "address" in block:  # older snapshots leave it to follow from the sizes before it
                address = _number(block, "address", f"a block of {where}")
            if address in seen:
                raise TraceError(f"{where} holds a second block at address {address}")
            seen.add(address)
            if block.get("state") in _LIVE_STATES:
                blocks.append((address, _requested_bytes(block, size, where), stream))
            address += size
    return blocks


def _requested_bytes(block: dict[str, Any], size: int, where: str) -> int:
    if "requested_size" not in block:
        return size
    return _number(block, "requested_size", f"a block of {where}")
