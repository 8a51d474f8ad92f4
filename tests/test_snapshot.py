"""A Snapshot says of each event what a snapshot taken then would have said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from samples import live_bytes
from snapshot_writer import DEFAULT_POOL, KEPT, LOSS, MIB, MINORS, MODEL, Recording

import vramx
from vramx.errors import InvalidValueError
from vramx.memory import replay
from vramx.memory.diff import diff
from vramx.memory.explain import explain
from vramx.memory.holders import frame_tree, holders, totals
from vramx.memory.snapshot import Snapshot
from vramx.memory.stacks import describe

GRAPH_POOL = (0, 1)


def some_program(minor: int, **options: Any) -> tuple[Recording, list[tuple[int, Any]]]:
    """Run a program of 300 steps; return it and, for some events, what held then."""
    recording = Recording(minor, **options)
    rng = random.Random(7)
    live: list[int] = []
    seen = []
    for step in range(300):
        if len(live) < 5 or rng.random() < 0.55:
            size = rng.choice([100, 4096, 3 * MIB, 15 * MIB])
            pool = rng.choice([DEFAULT_POOL, GRAPH_POOL])
            live.append(recording.alloc(size, rng.choice([MODEL, LOSS]), rng.choice([0, 9]), pool))
        else:
            recording.free(live.pop(rng.randrange(len(live))))
        if step % 40 == 39:
            recording.empty_cache()
        if step % 25 == 0:
            seen.append((len(recording.events) - 1, facts_of(recording)))
    return recording, seen


def facts_of(recording: Recording) -> tuple[int, int, list[int]]:
    return recording.live_bytes(), recording.reserved_bytes(), recording.holes()


def facts_at(snapshot: Snapshot, event: int) -> tuple[int, int, list[int]]:
    holes = [hole.size_bytes for hole in snapshot.holes_at(event)]
    return snapshot.live_bytes_at(event), snapshot.reserved_bytes_at(event), holes


@pytest.mark.parametrize("minor", MINORS)
def test_each_event_is_as_it_was_then(tmp_path: Path, minor: int) -> None:
    recording, seen = some_program(minor)
    snapshot = Snapshot.load(recording.save(tmp_path / "run.pickle"))
    assert len(seen) == 12
    for event, facts in seen:
        assert facts_at(snapshot, event) == facts
    assert facts_at(snapshot, -1) == (0, 0, [])
    assert snapshot.recorded_policy == "native"


@pytest.mark.parametrize("last", [1, 50, 200])
def test_a_ring_that_overflowed_loses_no_memory(tmp_path: Path, last: int) -> None:
    recording, seen = some_program(13)
    snapshot = Snapshot.load(recording.save(tmp_path / "late.pickle", last))
    before = len(recording.events) - last
    assert facts_at(snapshot, snapshot.end_event) == facts_of(recording)
    for event, facts in seen:
        if event >= before:
            assert facts_at(snapshot, event - before) == facts


def test_pages_that_are_mapped_beside_each_other_are_one_hole(tmp_path: Path) -> None:
    recording = Recording(expandable=True)
    recording.alloc(12 * MIB)
    first = recording.segments[0]
    recording._next = first.address + first.size
    recording.alloc(14 * MIB)
    for segment in recording.segments:
        recording.free(segment.address)
    before = recording.events[-1]
    recording.empty_cache()
    snapshot = Snapshot.load(recording.save(tmp_path / "run.pickle"))
    event = recording.events.index(before)
    assert [hole.size_bytes for hole in snapshot.holes_at(event)] == [26 * MIB]
    assert snapshot.holes_at(snapshot.end_event) == []
    assert snapshot.recorded_policy == "expandable"


def test_memory_that_waits_for_a_stream_is_live(tmp_path: Path) -> None:
    recording = Recording()
    recording.free(recording.alloc(4 * MIB), completed=False)
    snapshot = Snapshot.load(recording.save(tmp_path / "run.pickle"))
    assert snapshot.live_bytes_at(snapshot.end_event) == 4 * MIB


def test_before_pool_ids_were_recorded_segments_tell_the_pool(tmp_path: Path) -> None:
    recording = Recording(11)
    recording.alloc(5 * MIB, pool=GRAPH_POOL)
    recording.alloc(7 * MIB)
    snapshot = Snapshot.load(recording.save(tmp_path / "run.pickle"))
    by_pool = {each.name: each.bytes for each in holders(snapshot, 3, "pool")}
    assert by_pool == {"pool (0, 1)": 5 * MIB, "default pool": 7 * MIB}


@pytest.mark.parametrize("minor", MINORS)
def test_a_failed_request_is_read_with_its_line(tmp_path: Path, minor: int) -> None:
    recording = Recording(minor)
    recording.alloc(30 * MIB, KEPT)
    recording.oom(64 * MIB, device_free=5 * MIB)
    snapshot = Snapshot.load(recording.save(tmp_path / "oom.pickle"))
    (request,) = snapshot.failures
    assert (request.event, request.size_bytes, request.device_free_bytes) == (2, 64 * MIB, 5 * MIB)
    assert (
        describe(request.stack) == "model.py:12 forward < train.py:40 train (linear.py:134 forward)"
    )
    assert snapshot.live_bytes_at(2) == 30 * MIB
    assert snapshot.peak_event == 1
    assert live_bytes(snapshot.trace).tolist() == [30 * MIB, 94 * MIB, 94 * MIB, 30 * MIB]


@pytest.mark.usefixtures("core")
def test_a_replay_has_to_serve_the_request_that_failed(snapshots: Path) -> None:
    trace = vramx.load_trace(snapshots / "oom.pickle")
    (died,) = replay(trace, "live", capacity="2900MiB")
    assert (died.oom, died.oom_as_recorded) == (True, True)
    (served,) = replay(trace, "live", capacity="3100MiB")
    assert (served.oom, served.oom_as_recorded) == (False, False)
    (earlier,) = replay(trace, "live", capacity="1GiB")
    assert (earlier.oom, earlier.oom_as_recorded) == (True, False)


def test_stacks_name_the_programs_own_lines(tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc(3 * MIB, LOSS)
    recording.alloc(2 * MIB, [])
    recording.alloc(MIB, LOSS)
    snapshot = Snapshot.load(recording.save(tmp_path / "run.pickle"))
    found = holders(snapshot, snapshot.end_event)
    assert [(each.name, each.bytes, each.tensors, each.largest_bytes) for each in found] == [
        ("train.py:44 train (functional.py:3504 cross_entropy)", 4 * MIB, 2, 3 * MIB),
        ("(no stack recorded, as in backward)", 2 * MIB, 1, 2 * MIB),
    ]


def test_a_tree_of_frames_adds_up(snapshots: Path) -> None:
    snapshot = Snapshot.load(snapshots / "oom.pickle")
    tree = frame_tree(snapshot, snapshot.peak_event)
    assert tree.bytes == snapshot.live_bytes_at(snapshot.peak_event)
    nodes = [tree]
    for node in nodes:
        nodes += node.children.values()
        assert node.bytes >= sum(child.bytes for child in node.children.values())
    assert len(nodes) > 20


@pytest.mark.parametrize("name", ["train.pickle", "oom.pickle"])
def test_totals_add_up_on_real_snapshots(snapshots: Path, name: str) -> None:
    snapshot = Snapshot.load(snapshots / name)
    for event in (100, snapshot.peak_event, snapshot.end_event):
        total = totals(snapshot, event)
        parts = (total.live_bytes, total.rounding_bytes, total.free_bytes)
        assert sum(parts) == total.reserved_bytes
        assert min(parts) >= 0
        for by in ("stack", "size", "stream", "pool"):
            assert sum(each.bytes for each in holders(snapshot, event, by)) == total.live_bytes


@pytest.mark.parametrize("event", [-2, 3, 10**12, None, 1.5])
def test_an_event_that_is_not_there_is_refused(tmp_path: Path, event: int) -> None:
    recording = Recording()
    recording.free(recording.alloc(512))
    recording.events.pop(0)
    snapshot = Snapshot.load(recording.save(tmp_path / "run.pickle"))
    with pytest.raises(InvalidValueError, match=f"event {event} is not in run.pickle"):
        snapshot.live_bytes_at(event)


def test_a_grouping_that_is_unknown_is_refused(snapshots: Path) -> None:
    snapshot = Snapshot.load(snapshots / "train.pickle")
    with pytest.raises(InvalidValueError, match="accepted are stack, size, stream, pool"):
        holders(snapshot, 0, "colour")


@pytest.mark.parametrize("wrong", [3, None, b"run.pickle", []], ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        *(Snapshot.load, vramx.load_trace, vramx.replay, vramx.record, explain),
        *(diff, lambda wrong: diff([wrong, wrong])),
    ],
)
def test_what_is_no_path_and_no_snapshot_is_refused_in_one_line(call: Any, wrong: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"is not accepted; |too few") as raised:
        call(wrong)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("steps", [0, "2", 1.5])
def test_numbers_of_steps_and_policies_that_are_none_are_refused(
    snapshots: Path, steps: Any
) -> None:
    snapshot = Snapshot.load(snapshots / "train.pickle")
    with pytest.raises(InvalidValueError, match=f"steps {steps!r} is not accepted"):
        diff([snapshot, snapshot], steps=steps)
    with pytest.raises(InvalidValueError, match=f"policy {steps!r} is not accepted"):
        replay(snapshot, steps)
    with pytest.raises(InvalidValueError, match="a file's name"):
        snapshot.trace.save(3)  # type: ignore[arg-type]
