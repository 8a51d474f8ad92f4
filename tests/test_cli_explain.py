"""`vramx explain`: the request, the limit, the cause, and remedies that were replayed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from samples import event
from snapshot_writer import KEPT, MIB, MODEL, Recording

from vramx.memory.explain import Explanation, explain
from vramx.memory.snapshot import Snapshot

GIB = 1 << 30

pytest.importorskip("vramx._core", reason="the compiled core is not built")


def explained(run: Any, path: Path, *arguments: Any) -> dict[str, Any]:
    code, out, err = run("explain", path, "--json", *arguments)
    assert err == ""
    report: dict[str, Any] = json.loads(out)
    assert code == (0 if report["request"] is None else 1)
    return report


def fitting(report: dict[str, Any]) -> dict[str, Any]:
    return {remedy["policy"]: remedy["fits"] for remedy in report["remedies"]}


def fragmented(tmp_path: Path, device_free: int, request: int = 60 * MIB, **options: Any) -> Path:
    """Every other of forty blocks of 6 MiB is freed, and then 60 MiB are asked for."""
    recording = Recording(**options)
    blocks = [recording.alloc(6 * MIB, KEPT) for _ in range(40)]
    for address in blocks[::2]:
        recording.free(address)
    recording.oom(request, device_free)
    return recording.save(tmp_path / "oom.pickle")


def test_a_real_failure_is_explained(run: Any, snapshots: Path) -> None:
    report = explained(run, snapshots / "oom.pickle", "--capacity", "3GiB")
    assert report["request"]["size_bytes"] == 512 * MIB
    assert report["request"]["stack"][3] == {"name": "forward", "filename": "train.py", "line": 12}
    assert report["cause"] == "fragmentation"
    assert report["holders"][0]["name"] == "train.py:6 forward < train.py:11 forward"
    assert fitting(report) == {"native": False, "expandable": False, "vramx": True}
    fidelity = report["fidelity"]
    assert (fidelity["reproduced"], fidelity["recorded"]) == (58, 58)
    assert fidelity["peak_error"] == 0
    assert fidelity["fails_too"] is True


def test_a_limit_that_is_not_recorded_is_bounded(run: Any, snapshots: Path) -> None:
    report = explained(run, snapshots / "oom.pickle")
    limit = report["capacity"]
    assert limit["source"] == "limit"
    assert limit["low_bytes"] <= 3 * GIB <= limit["high_bytes"]  # it was 3 GiB
    assert report["cause"] == "fragmentation_or_size"
    assert fitting(report) == {"native": False, "expandable": None, "vramx": None}
    text = " ".join(run("explain", snapshots / "oom.pickle")[1].split())
    assert "asked 512.00 MiB at train.py:12 forward < train.py:17 train" in text
    assert "fragmentation, if the limit was 2.961 GiB or more; else size" in text
    assert "reproduces 58 of 58 recorded segment events, its reserved peak off by 0.0%" in text


def test_what_the_device_had_free_is_the_limit_and_each_remedy_has_its_line(
    run: Any, tmp_path: Path
) -> None:
    path, free = fragmented(tmp_path, device_free=10 * MIB), 290 * MIB
    report = explained(run, path)
    assert report["capacity"] == {"low_bytes": free, "high_bytes": free, "source": "device"}
    assert report["cause"] == "fragmentation"
    assert fitting(report) == {"native": False, "expandable": False, "vramx": True}
    assert report["remedies"][0]["needs_bytes"] == 340 * MIB
    _, out, _ = run("explain", path)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in out
    assert "vramx run SCRIPT" in out
    assert "50.00 MiB more" in out


@pytest.mark.parametrize(
    ("request_bytes", "cause"), [(500 * MIB, "size"), (5 * MIB, "fitting_block")]
)
def test_too_little_memory_and_a_block_that_would_have_fitted_are_no_fragmentation(
    run: Any, tmp_path: Path, request_bytes: int, cause: str
) -> None:
    report = explained(run, fragmented(tmp_path, device_free=0, request=request_bytes))
    assert report["cause"] == cause
    assert cause != "size" or not any(fitting(report).values())


@pytest.mark.parametrize(
    ("taken", "asked", "stream"),
    [(40 * MIB, 30 * MIB, 5), (40 * MIB, 600_000, 0), (600_000, MIB + 512, 0)],
)
def test_a_free_block_of_another_stream_or_for_other_sizes_does_not_fit(
    run: Any, tmp_path: Path, taken: int, asked: int, stream: int
) -> None:
    recording = Recording()
    recording.free(recording.alloc(taken, KEPT, stream))
    recording.oom(asked)
    report = explained(run, recording.save(tmp_path / "oom.pickle"))
    assert (report["cause"], report["fitting_hole_bytes"]) == ("elsewhere", 0)


def test_what_a_replay_leaves_out_is_said(run: Any, tmp_path: Path) -> None:
    path = fragmented(tmp_path, 10 * MIB, max_split_size=256 * MIB)
    assert explained(run, path)["fidelity"]["unmodelled"] == ["max_split_size"]
    assert "Not replayed: max_split_size." in run("explain", path)[1]
    assert "Not replayed" not in run("explain", fragmented(tmp_path, 10 * MIB))[1]
    recording = Recording()
    recording.events.append(event("move", recording.alloc(4 * MIB, KEPT), 1))  # of a later torch
    recording.oom(8 * MIB, 2 * MIB)
    report = explained(run, recording.save(tmp_path / "oom.pickle"))
    said = ["events of an action that is not known, 'move'"]
    assert report["fidelity"]["unmodelled"] == said


def test_a_recording_that_began_late_is_replayed_with_a_word_of_it(
    run: Any, snapshots: Path, tmp_path: Path
) -> None:
    snapshot = pickle.loads((snapshots / "oom.pickle").read_bytes())
    del snapshot["device_traces"][0][:6300]
    path = tmp_path / "late.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    report = explained(run, path)
    whole = explained(run, snapshots / "oom.pickle")
    for key in ("cause", "capacity", "enough_from_bytes", "fitting_hole_bytes"):
        assert report[key] == whole[key]
    assert report["at"] == {**whole["at"], "event": 42}
    assert fitting(report)["native"] is False  # though its replay needs less than the limit may be
    assert report["fidelity"]["unmodelled"] == ["where memory from before the recording lay"]


def test_a_replay_that_differs_from_the_recording_is_said(
    run: Any, snapshots: Path, tmp_path: Path
) -> None:
    snapshot = pickle.loads((snapshots / "train.pickle").read_bytes())
    grown = [each for each in snapshot["device_traces"][0] if each["action"] == "segment_alloc"]
    grown[3]["size"] += 2 * MIB  # as if torch had taken more for one request, less for the next
    grown[4]["size"] -= 2 * MIB
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    fidelity = explained(run, path)["fidelity"]
    assert (fidelity["reproduced"], fidelity["recorded"]) == (43, 45)


@pytest.mark.parametrize(
    ("settings", "policy", "said"),
    [
        ({"expandable_segments": False}, "vramx", "vramx, as it was"),  # which maps all the same
        ({}, "expandable", "expandable_segments, as it was"),
    ],
)
def test_what_maps_memory_is_told_by_its_settings(
    run: Any, tmp_path: Path, settings: dict[str, bool], policy: str, said: str
) -> None:
    path = fragmented(tmp_path, device_free=10 * MIB, expandable=True, **settings)
    report = explained(run, path)
    assert report["recorded_policy"] == policy
    assert policy == "vramx" or report["fidelity"]["policy"] == policy
    assert said in run("explain", path)[1]


def test_the_last_failure_is_explained_without_those_before(run: Any, tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc(20 * MIB, KEPT)
    recording.oom(8 * GIB, device_free=GIB)
    recording.oom(2 * GIB, device_free=GIB, frames=MODEL)
    path = recording.save(tmp_path / "oom.pickle")
    report = explained(run, path)
    assert report["failures"] == 2
    assert report["request"]["size_bytes"] == 2 * GIB
    assert report["remedies"][2]["needs_bytes"] == 2 * GIB + 20 * MIB
    assert "out of memory at event 3 of 4; 1 failed before it" in run("explain", path)[1]


def test_a_mistyped_shape_fits_no_gpu(run: Any, tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc(20 * MIB, KEPT)
    recording.oom(1 << 60, device_free=GIB)
    path = recording.save(tmp_path / "oom.pickle")
    report = explained(run, path)
    assert [remedy["needs_bytes"] for remedy in report["remedies"]] == [None] * 3
    assert "more than any GPU has" in run("explain", path)[1]
    assert "bigger card" not in run("explain", path)[1]


def test_without_a_failure_the_peak_is_explained(run: Any, snapshots: Path) -> None:
    report = explained(run, snapshots / "train.pickle")
    assert (report["request"], report["cause"], report["capacity"]) == (None, None, None)
    assert (report["fidelity"]["reproduced"], report["fidelity"]["recorded"]) == (45, 45)
    needs = [remedy["needs_bytes"] for remedy in report["remedies"]]
    assert needs == sorted(needs, reverse=True)
    assert "no request failed" in run("explain", snapshots / "train.pickle")[1]


def test_a_peak_before_the_history_is_said_to_be_there(run: Any, tmp_path: Path) -> None:
    recording = Recording()
    recording.free(recording.alloc(6 * MIB))
    path = recording.save(tmp_path / "late.pickle", last=2)
    assert "the peak, before the first event\n" in run("explain", path)[1]


# --- memory pools ---------------------------------------------------------------------------------


POOL = (1, 0)
BUFFER = 12 * MIB  # of which torch makes segments without a rest


def explained_at(path: Path, recording: Recording, limit_bytes: int) -> Explanation:
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
    why = explained_at(path, idle_pool(minor), 20 * BUFFER)
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
    why = explained_at(path, recording, 22 * BUFFER)
    fits = {each.policy: each.fits for each in why.remedies}
    assert fits["vramx"] is True
    (vramx,) = (each for each in why.remedies if each.policy == "vramx")
    assert vramx.expected_reserved_bytes == 20 * BUFFER


def test_a_recording_all_in_a_pool_is_replayed_as_it_is(path: Path) -> None:
    recording = Recording()
    for _ in range(3):
        recording.alloc(BUFFER, pool=POOL)
    why = explained_at(path, recording, 10 * BUFFER)
    assert {each.needs_bytes for each in why.remedies if each.policy != "expandable"} == {
        3 * BUFFER
    }
