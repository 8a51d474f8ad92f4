"""What blocks take of torch's allocator: against real recordings, and rule by rule."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import recorded_snapshot

from vramx.memory.blocks import rounded
from vramx.memory.snapshot import Snapshot

MIB = 1 << 20


def event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0}


def recorded(tmp_path: Path, *events: dict[str, Any], **settings: Any) -> Snapshot:
    """Return a snapshot of these events, at whose end nothing is held."""
    path = tmp_path / "run.pickle"
    data = {"segments": [], "device_traces": [list(events)], "allocator_settings": settings}
    path.write_bytes(pickle.dumps(data, protocol=4))
    return Snapshot.load(path)


@pytest.mark.parametrize("name", ["train", "oom"])
def test_blocks_of_a_real_run_are_those_that_torch_recorded(snapshots: Path, name: str) -> None:
    snapshot = Snapshot.load(snapshots / f"{name}.pickle")
    live = snapshot.live_at(snapshot.end_event)
    assert np.array_equal(snapshot.block_bytes[live], snapshot.allocations.block_bytes[live])
    # Rounding alone would not do, neither for those nor for what is gone by then.
    asked = rounded(snapshot.allocations.size)
    assert (snapshot.block_bytes[live] > asked[live]).sum() == 4
    assert (snapshot.block_bytes > asked).sum() > 40
    assert (snapshot.block_bytes >= asked).all()


def test_a_recording_that_contradicts_the_rules_is_rounded(tmp_path: Path) -> None:
    data = pickle.loads(recorded_snapshot("train"))
    wrong = copy.deepcopy(data)
    for segment in wrong["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["size"] > block["requested_size"]:
                block["size"] = rounded(np.array(block["requested_size"])).item()
    path = tmp_path / "wrong.pickle"
    path.write_bytes(pickle.dumps(wrong, protocol=4))
    snapshot = Snapshot.load(path)
    assert np.array_equal(snapshot.block_bytes, snapshot.allocations.block_bytes)


M = MIB
# What is allocated (+) and freed (-), as address and size, and what its blocks take.
RULES: dict[str, tuple[list[int], list[tuple[str, int, int]], list[int]]] = {
    "what is too little for a block of its own is handed out": (
        [20],
        [
            *(("+", 0, 19 * M), ("-", 0, 19 * M)),  # leaves 1 MiB
            *(("+", 0, 19 * M - 1), ("-", 0, 19 * M - 1)),  # also, once it is rounded
            *(("+", 0, 19 * M - 512), ("+", 19 * M - 512, M + 512)),
        ],
        [20 * M, 20 * M, 19 * M - 512, M + 512],
    ),
    "small requests leave what is left over": (
        [2],
        [("+", 0, M), ("+", M, M - 512), ("+", 2 * M - 512, 1)],
        [M, M - 512, 512],
    ),
    "ranges are joined within a segment and never beyond": (
        [20, 20],
        [
            *(("+", 0, 8 * M), ("+", 8 * M, 8 * M), ("+", 20 * M, 12 * M)),
            *(("-", 8 * M, 8 * M), ("-", 20 * M, 12 * M), ("-", 0, 8 * M)),
            *(("+", 0, 19 * M), ("-", 0, 19 * M)),
        ],
        [8 * M, 8 * M, 12 * M, 20 * M],
    ),
    # Of an allocator that hands out what it has not taken back, as a history of the host's is; the
    # first block is not where the free range begins.
    "a recording whose free ranges overlap is rounded": (
        [20],
        [
            *(("+", 16 * M, 4 * M), ("-", 16 * M, 4 * M)),
            *(("+", 0, 8 * M), ("+", 16 * M, 4 * M), ("+", 8 * M, M)),
        ],
        [4 * M, 8 * M, 4 * M, M],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_blocks_are_those_of_torchs_rules(tmp_path: Path, rule: str) -> None:
    segments, steps, expected = RULES[rule]
    actions = {"+": "alloc", "-": "free_completed"}
    events = [event("segment_alloc", 20 * M * i, size * M) for i, size in enumerate(segments)]
    events += [event(actions[sign], address, size) for sign, address, size in steps]
    events += [event("segment_free", 20 * M * i, size * M) for i, size in enumerate(segments) if i]
    assert recorded(tmp_path, *events).block_bytes.tolist() == expected


def test_a_limit_of_splitting_hands_out_all(tmp_path: Path) -> None:
    events = [event("segment_alloc", 0, 64 * MIB), event("alloc", 0, 32 * MIB)]
    events.append(event("free_completed", 0, 32 * MIB))
    snapshot = recorded(tmp_path, *events, max_split_size=16 * MIB)
    assert snapshot.block_bytes.tolist() == [64 * MIB]
    assert snapshot.peak_block_bytes == 64 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_events_that_no_allocator_makes_are_rounded_or_followed(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    events, live = [event("segment_alloc", 0, 20 * MIB)], {}
    for _ in range(200):
        address, size = (int(n) * 512 for n in random.integers(1, 4096, 2))
        if live and random.random() < 0.5:
            address, size = live.popitem()
            events.append(event("free_completed", address, size))
        elif address not in live:
            live[address] = size
            events.append(event("alloc", address, size))
    assert (recorded(tmp_path, *events).block_bytes >= 512).all()
