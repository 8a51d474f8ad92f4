"""`vramx explain`: the request, the limit, the cause, and remedies that were replayed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from snapshot_writer import KEPT, MIB, MODEL, Recording

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


def test_what_the_device_had_free_is_the_limit(run: Any, tmp_path: Path) -> None:
    report = explained(run, fragmented(tmp_path, device_free=10 * MIB))
    assert report["capacity"] == {
        "low_bytes": 290 * MIB,
        "high_bytes": 290 * MIB,
        "source": "device",
    }
    assert report["cause"] == "fragmentation"
    assert fitting(report) == {"native": False, "expandable": False, "vramx": True}
    assert report["remedies"][0]["needs_bytes"] == 340 * MIB


def test_the_line_to_write_stands_beside_each_remedy(run: Any, tmp_path: Path) -> None:
    _, out, _ = run("explain", fragmented(tmp_path, device_free=10 * MIB))
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


def test_an_action_of_a_later_torch_is_named(run: Any, tmp_path: Path) -> None:
    recording = Recording()
    address = recording.alloc(4 * MIB, KEPT)
    recording.events.append({"action": "move", "addr": address, "size": 1, "stream": 0})
    recording.events[-1]["time_us"] = recording.events[-2]["time_us"]
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
