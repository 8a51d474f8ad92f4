"""Torch snapshots become traces: exact on real ones, tolerant of versions and of gaps."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from samples import block, event, live_bytes, rows, segment

from vramx.errors import TraceError
from vramx.memory.trace import load_trace


@pytest.mark.parametrize(
    ("name", "rows_", "allocations"), [("train.pickle", 4120, 1478), ("oom.pickle", 6391, 2235)]
)
def test_real_snapshot_has_every_event(
    snapshots: Path, name: str, rows_: int, allocations: int
) -> None:
    trace = load_trace(snapshots / name)
    assert (trace.name, trace.device, len(trace)) == (name, 0, rows_)
    assert trace.id[trace.op == 0].tolist() == list(range(allocations))
    segments = pickle.loads((snapshots / name).read_bytes())["segments"]
    blocks = [b for s in segments for b in s["blocks"] if b["state"].startswith("active")]
    live = live_bytes(trace)
    assert live[-1] == sum(b["requested_size"] for b in blocks)
    assert live.min() >= 0


@pytest.mark.parametrize("cut", [1, 500, 2000, 4164])
def test_late_recording_ends_with_the_same_live_bytes(snapshots: Path, read: Any, cut: int) -> None:
    snapshot = pickle.loads((snapshots / "train.pickle").read_bytes())
    whole = live_bytes(load_trace(snapshots / "train.pickle"))
    late = read(*snapshot["device_traces"][0][cut:], segments=snapshot["segments"])
    assert live_bytes(late)[-1] == whole[-1]
    assert live_bytes(late).min() >= 0


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (  # an address that is used again is another allocation
            [("alloc", 100, 0), ("free_requested", 100, 5), ("free_completed", 100, 7),
             ("alloc", 200, 9)],
            [(0, 0, 100, 0, 0), (1, 0, 100, 0, 5), (2, 0, 100, 0, 7), (0, 1, 200, 0, 9)],
        ),
        (  # a missing free is completed when the address is used again
            [("alloc", 100, 0), ("alloc", 200, 6)],
            [(0, 0, 100, 0, 0), (1, 0, 100, 0, 6), (2, 0, 100, 0, 6), (0, 1, 200, 0, 6)],
        ),
        (  # a completed free without a request gets one
            [("alloc", 100, 0), ("free_completed", 100, 6)],
            [(0, 0, 100, 0, 0), (1, 0, 100, 0, 6), (2, 0, 100, 0, 6)],
        ),
    ],
    ids=["used again", "missing free", "missing request"],
)  # fmt: skip
def test_events_at_one_address_become_whole_lives(read: Any, events: Any, expected: Any) -> None:
    made = (event(action, 0x1000, size, at) for action, size, at in events)
    assert rows(read(*made)) == expected


def test_a_free_of_older_memory_is_allocated_at_the_start(read: Any) -> None:
    trace = read(
        event("alloc", 0x1000, 100),
        event("free_requested", 0x9000, 700, 3),
        event("free_completed", 0x9000, 700, 4),
    )
    assert rows(trace) == [
        *((0, 0, 700, 0, 0), (0, 1, 100, 0, 0), (1, 0, 700, 0, 3), (2, 0, 700, 0, 4))
    ]


def test_blocks_alive_without_an_event_are_allocated_at_the_start(read: Any) -> None:
    blocks = [
        block(0x1000, 512, 100),
        block(0x1200, 512, 300),
        block(0x1400, 512, 0, "inactive"),
        block(0x1600, 512, 500, "active_pending_free"),
    ]
    trace = read(event("alloc", 0x1000, 100), segments=[segment(*blocks)])
    assert rows(trace) == [(0, 0, 300, 0, 0), (0, 1, 500, 0, 0), (0, 2, 100, 0, 0)]


def test_block_addresses_follow_from_sizes_where_absent(read: Any) -> None:
    blocks = [block(0, 512, 100), block(0, 512, 300)]
    for older in blocks:
        del older["address"]
    trace = read(event("alloc", 0x1200, 300), segments=[segment(*blocks)])
    assert [size for _, _, size, _, _ in rows(trace)] == [100, 300]


def test_more_streams_than_a_byte_numbers_are_refused(read: Any) -> None:
    with pytest.raises(TraceError, match="256 streams"):
        read(*(event("alloc", 0x1000 * i, 8, i, stream=i) for i in range(1, 258)))


def test_other_actions_and_unknown_fields_are_passed_over(read: Any) -> None:
    newer = {**event("alloc", 0x1000, 100), "pool_id": (0, 0), "internal_metadata": {"a": 1}}
    trace = read(
        event("segment_alloc", 0x1000, 2 << 20), newer, {"action": "annotate", "text": "x"}
    )
    assert rows(trace) == [(0, 0, 100, 0, 0)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([10, 4, 12, 11], [0, 0, 2, 2]),  # they never run backwards
        ([0, 10_000_000_000], [0, (1 << 32) - 1]),  # beyond 71 minutes they share the last moment
    ],
)
def test_times_are_those_since_the_first_event(read: Any, times: Any, expected: Any) -> None:
    trace = read(*(event("alloc", 0x1000 * i, 8, at) for i, at in enumerate(times)))
    assert trace.time_us.tolist() == expected


def test_streams_are_numbered_in_order_of_appearance(read: Any) -> None:
    streams = [247758464, 0, 99, 247758464]
    trace = read(*(event("alloc", 0x1000 * i, 8, i, s) for i, s in enumerate(streams)))
    assert trace.stream.tolist() == [1, 0, 2, 1]
    freed = event("free_completed", 0x9000, 700, 3, stream=555)  # of older memory
    trace = read(event("alloc", 0x1000, 100, stream=444), freed)
    assert trace.stream.tolist() == [2, 1, 2, 2]


def two_devices(path: Path) -> Path:
    device_1 = [event("alloc", 0x1000, 300), event("alloc", 0x2000, 400)]
    snapshot = {
        "segments": [segment(block(0x9000, 512, 77)), segment(block(0x9000, 512, 88), device=1)],
        "device_traces": [[event("alloc", 0x1000, 100)], device_1, []],
    }
    path.write_bytes(pickle.dumps(snapshot))
    return path


def test_the_busiest_device_is_read_unless_one_is_named(tmp_path: Path) -> None:
    path = two_devices(tmp_path / "two.pickle")
    assert load_trace(path).size.tolist() == [88, 300, 400]
    assert load_trace(path, device=0).size.tolist() == [77, 100]


def test_the_device_that_ran_out_of_memory_comes_first(tmp_path: Path) -> None:
    oom = {"action": "oom", "size": 512, "stream": 0, "time_us": 5, "device_free": 5}
    busy = [event("alloc", 0x1000 * i, 300) for i in range(1, 9)]
    path = tmp_path / "oom.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [busy, [oom], busy]}))
    assert load_trace(path).device == 1
    assert load_trace(path, device=2).device == 2


@pytest.mark.parametrize("device", [2, 3, -1])
def test_a_device_without_events_is_refused(tmp_path: Path, device: int) -> None:
    with pytest.raises(TraceError, match=f"no events of device {device}; it has them of 0, 1"):
        load_trace(two_devices(tmp_path / "two.pickle"), device=device)


FORMS: dict[str, Callable[[Any], bytes]] = {
    **{
        f"{number}.pkl": partial(pickle.dumps, protocol=number)
        for number in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "train.json": lambda snapshot: json.dumps(snapshot).encode(),
    "train.json.gz": lambda snapshot: gzip.compress(json.dumps(snapshot).encode()),
    "train.pickle.gz": lambda snapshot: gzip.compress(pickle.dumps(snapshot)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_snapshot_in_each_form_says_the_same(snapshots: Path, tmp_path: Path, name: str) -> None:
    snapshot = pickle.loads((snapshots / "train.pickle").read_bytes())
    (tmp_path / name).write_bytes(FORMS[name](snapshot))
    assert rows(load_trace(tmp_path / name)) == rows(load_trace(snapshots / "train.pickle"))
