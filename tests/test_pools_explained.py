"""A recording with memory pools: what remedies are said to need, where torch serves the pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from snapshot_writer import MIB, Recording

from vramx.memory.explain import Explanation, explain
from vramx.memory.snapshot import Snapshot

POOL = (1, 0)
BUFFER = 12 * MIB  # of which torch makes segments without a rest


def explained(path: Path, recording: Recording, limit_bytes: int) -> Explanation:
    return explain(Snapshot.load(recording.save(path)), capacity=limit_bytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "oom.pickle"


def idle_pool(minor: int) -> Recording:
    """A pool whose ten buffers are gone, ten outside of it, and an eleventh that does not fit."""
    recording = Recording(minor)
    for address in [recording.alloc(BUFFER, pool=POOL) for _ in range(10)]:
        recording.free(address)
    for _ in range(10):
        recording.alloc(BUFFER)
    recording.oom(BUFFER)
    return recording


@pytest.mark.parametrize("minor", [11, 13])
def test_what_a_pool_holds_is_nobody_elses_under_any_policy(path: Path, minor: int) -> None:
    why = explained(path, idle_pool(minor), 20 * BUFFER)
    needs = {each.policy: each.needs_bytes for each in why.remedies}
    assert needs["native"] == needs["vramx"] == 21 * BUFFER
    assert needs["expandable"] == pytest.approx(21 * BUFFER, abs=40 * MIB)  # in pages of 20 MiB
    assert not any(each.fits for each in why.remedies)


def test_outside_of_a_pool_another_policy_may_help(path: Path) -> None:
    recording = Recording()
    for address in [recording.alloc(BUFFER, pool=POOL) for _ in range(10)]:
        recording.free(address)
    kept = [recording.alloc(BUFFER) for _ in range(10)]
    for address in kept[::2]:
        recording.free(address)
    recording.oom(5 * BUFFER)  # as much as is free, in five pieces
    why = explained(path, recording, 22 * BUFFER)
    fits = {each.policy: each.fits for each in why.remedies}
    assert fits["vramx"] is True
    (vramx,) = (each for each in why.remedies if each.policy == "vramx")
    assert vramx.expected_reserved_bytes == 20 * BUFFER


def test_a_recording_all_in_a_pool_is_replayed_as_it_is(path: Path) -> None:
    recording = Recording()
    for _ in range(3):
        recording.alloc(BUFFER, pool=POOL)
    why = explained(path, recording, 10 * BUFFER)
    assert {each.needs_bytes for each in why.remedies if each.policy != "expandable"} == {
        3 * BUFFER
    }
