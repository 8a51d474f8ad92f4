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


def test_what_is_too_little_for_a_block_of_its_own_is_handed_out(tmp_path: Path) -> None:
    snapshot = recorded(
        tmp_path,
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 19 * MIB),  # leaves 1 MiB
        event("free_completed", 0, 19 * MIB),
        event("alloc", 0, 19 * MIB - 1),  # also, once it is rounded
        event("free_completed", 0, 19 * MIB - 1),
        event("alloc", 0, 19 * MIB - 512),
        event("alloc", 19 * MIB - 512, MIB + 512),
    )
    assert snapshot.block_bytes.tolist() == [20 * MIB, 20 * MIB, 19 * MIB - 512, MIB + 512]
    assert snapshot.peak_block_bytes == 20 * MIB


def test_small_requests_leave_what_is_left_over(tmp_path: Path) -> None:
    snapshot = recorded(
        tmp_path,
        event("segment_alloc", 0, 2 * MIB),
        event("alloc", 0, MIB),
        event("alloc", MIB, MIB - 512),
        event("alloc", 2 * MIB - 512, 1),
    )
    assert snapshot.block_bytes.tolist() == [MIB, MIB - 512, 512]


def test_ranges_are_joined_within_a_segment_and_never_beyond(tmp_path: Path) -> None:
    snapshot = recorded(
        tmp_path,
        event("segment_alloc", 0, 20 * MIB),
        event("segment_alloc", 20 * MIB, 20 * MIB),
        event("alloc", 0, 8 * MIB),
        event("alloc", 8 * MIB, 8 * MIB),
        event("alloc", 20 * MIB, 12 * MIB),
        event("free_completed", 8 * MIB, 8 * MIB),
        event("free_completed", 20 * MIB, 12 * MIB),
        event("free_completed", 0, 8 * MIB),
        event("alloc", 0, 19 * MIB),
        event("free_completed", 0, 19 * MIB),
        event("segment_free", 20 * MIB, 20 * MIB),
    )
    assert snapshot.block_bytes.tolist() == [8 * MIB, 8 * MIB, 12 * MIB, 20 * MIB]


def test_a_limit_of_splitting_hands_out_all(tmp_path: Path) -> None:
    snapshot = recorded(
        tmp_path,
        event("segment_alloc", 0, 64 * MIB),
        event("alloc", 0, 32 * MIB),
        event("free_completed", 0, 32 * MIB),
        max_split_size=16 * MIB,
    )
    assert snapshot.block_bytes.tolist() == [64 * MIB]


def test_a_recording_whose_free_ranges_overlap_is_rounded(tmp_path: Path) -> None:
    """Of an allocator that hands out what it has not taken back, as a history of the host's is."""
    snapshot = recorded(
        tmp_path,
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 16 * MIB, 4 * MIB),  # not where the free range begins
        event("free_completed", 16 * MIB, 4 * MIB),
        event("alloc", 0, 8 * MIB),
        event("alloc", 16 * MIB, 4 * MIB),
        event("alloc", 8 * MIB, MIB),
    )
    assert snapshot.block_bytes.tolist() == [4 * MIB, 8 * MIB, 4 * MIB, MIB]


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
