"""`vramx replay` and vramx.replay: arguments, the report as JSON and tables, files, progress."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from samples import SMALL, assert_one_line_refusal, live_bytes

import vramx
from vramx.errors import InvalidValueError, TraceError
from vramx.memory import POLICIES, ReplayOptions, replay
from vramx.memory.trace import load_trace

CALLS = {"create", "map", "set_access", "unmap", "release"}
FIGURES = {
    "peak_reserved_bytes": int,
    "peak_allocated_bytes": int,
    "min_capacity_bytes": int | None,
    "oom": bool,
    "ns_per_event": float,
    "driver_calls": dict,
    "driver_us": float,
    "driver_us_second_half": float,
    "trace_us": float,
}


@pytest.mark.usefixtures("core")
def test_json_has_the_schema(run: Any, traces: Path, snapshots: Path) -> None:
    code, out, err = run("replay", traces / SMALL, snapshots / "train.pickle", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert set(report) == {"schema", "traces"}
    assert report["schema"] == 1
    assert [entry["trace"] for entry in report["traces"]] == [SMALL, "train.pickle"]
    for entry in report["traces"]:
        assert set(entry) == {"trace", "events", "peak_live_bytes", "policies"}
        assert tuple(entry["policies"]) == POLICIES
        for figures in entry["policies"].values():
            assert set(figures) == set(FIGURES)
            assert all(isinstance(figures[name], kind) for name, kind in FIGURES.items())
            assert set(figures["driver_calls"]) == CALLS


@pytest.mark.usefixtures("core")
def test_figures_agree_with_the_trace(run: Any, traces: Path) -> None:
    trace = load_trace(traces / SMALL)
    peak_live = int(live_bytes(trace).max())
    _, out, _ = run("replay", traces / SMALL, "--json", "--min-capacity")
    (entry,) = json.loads(out)["traces"]
    assert entry["events"] == np.count_nonzero(trace.op != 1)
    assert entry["peak_live_bytes"] == peak_live
    assert entry["policies"]["live"]["peak_reserved_bytes"] == peak_live
    for figures in entry["policies"].values():
        assert figures["peak_reserved_bytes"] >= figures["peak_allocated_bytes"] >= peak_live
        assert figures["min_capacity_bytes"] >= peak_live
        assert figures["trace_us"] == int(trace.time_us[-1])


@pytest.mark.usefixtures("core")
def test_policies_come_in_the_order_asked_for_and_the_minimum_only_if_it_is(
    run: Any, traces: Path
) -> None:
    _, out, _ = run("replay", traces / SMALL, "--json", "--policy", "vramx, live,vramx")
    policies = json.loads(out)["traces"][0]["policies"]
    assert list(policies) == ["vramx", "live"]
    assert policies["vramx"]["min_capacity_bytes"] is None


@pytest.mark.usefixtures("core")
def test_too_little_memory_is_a_result_and_not_an_error(run: Any, traces: Path) -> None:
    code, out, _ = run("replay", traces / SMALL, "--json", "--capacity", "1GiB")
    policies = json.loads(out)["traces"][0]["policies"]
    assert code == 0
    assert all(figures["oom"] for figures in policies.values())
    _, out, _ = run("replay", traces / SMALL, "--capacity", "1GiB", "--policy", "vramx")
    assert "out of memory, event " in out


@pytest.mark.usefixtures("stand_in")
def test_table_shows_gib_and_the_ratio_to_live(run: Any, traces: Path) -> None:
    code, out, err = run("replay", traces / SMALL, "--min-capacity")
    assert (code, err) == (0, "")
    assert out.startswith(f"{SMALL}: 16,417 events in 12.5 s, 5.719 GiB live at the peak\n")
    row = next(line.split() for line in out.splitlines() if line.startswith(" vramx"))
    assert row[:7] == ["vramx", "5.721", "GiB", "1.000x", "5.721", "GiB", "1.000x"]
    assert max(map(len, out.splitlines())) <= 120


def test_a_block_that_changed_under_its_owner_fails_the_command(
    run: Any, traces: Path, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = stand_in.Replay.run
    changed = {"mismatches": 3}
    monkeypatch.setattr(
        stand_in.Replay, "run", lambda *args, **named: sound(*args, **named) | changed
    )
    code, out, err = run("replay", traces / SMALL, "--policy", "vramx")
    assert code == 1
    assert "3 blocks corrupted" in out
    assert "offload_streams.npz: 3 blocks changed under their owner with policy vramx" in err


@pytest.mark.usefixtures("stand_in")
def test_a_written_file_has_the_permissions_of_any_new_file(
    run: Any, traces: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain").touch()
    run("replay", traces / SMALL, "-o", tmp_path / "report")
    assert (tmp_path / "report").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("output", "what"),
    [
        ("absent/report.json", "does not exist"),
        ("folder", "it is not a regular file"),
        ("/dev/null", "it is not a regular file"),
    ],
)
@pytest.mark.parametrize("force", [[], ["-f"]])
def test_output_that_cannot_be_written_is_refused(
    run: Any, traces: Path, tmp_path: Path, output: str, what: str, force: list[str]
) -> None:
    (tmp_path / "folder").mkdir()
    code, out, err = run("replay", traces / SMALL, "-o", tmp_path / output, *force)
    assert_one_line_refusal(code, out, err, what)


@pytest.mark.usefixtures("stand_in")
def test_nothing_is_left_where_writing_fails(
    run: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    code, out, err = run("replay", traces / SMALL, "-o", tmp_path / "report")
    assert_one_line_refusal(code, out, err, "cannot be written: No space left on device")
    assert not list(tmp_path.iterdir())


# --- as a library ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("core")
def test_replay_takes_a_path_and_reports_progress(traces: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    options = ReplayOptions(progress=lambda *step: seen.append(step))
    (result,) = vramx.replay(traces / SMALL, "vramx", options=options)
    assert (result.trace, result.policy) == (SMALL, "vramx")
    assert seen
    assert all(policy == "vramx" and 0 <= done <= total for policy, done, total in seen)


@pytest.mark.usefixtures("stand_in")
def test_replay_refuses_wrong_arguments(traces: Path) -> None:
    with pytest.raises(InvalidValueError, match="policy 'x' is not accepted"):
        replay(traces / SMALL, ["live", "x"])
    with pytest.raises(InvalidValueError, match="no policy"):
        replay(traces / SMALL, [])
    with pytest.raises(InvalidValueError, match="driver 'x'"):
        ReplayOptions(driver="x")
    with pytest.raises(TraceError, match="No such file"):
        replay(traces / "absent.npz")
    with pytest.raises(InvalidValueError, match="trace 3 is not accepted"):
        replay(3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("stand_in")
def test_a_snapshot_that_is_loaded_replays_as_its_file_does(snapshots: Path) -> None:
    path = snapshots / "train.pickle"
    (of_file,), (of_snapshot,) = (
        replay(source, "live") for source in (path, vramx.Snapshot.load(path))
    )
    assert of_snapshot.to_dict()["peak_reserved_bytes"] == of_file.peak_reserved_bytes > 0
    assert (of_snapshot.trace, of_snapshot.events) == (of_file.trace, of_file.events)


@pytest.mark.parametrize(("event_ns", "runs"), [(40.0, 9), (1e9, 1)], ids=["short", "long"])
def test_a_short_run_is_timed_again(
    traces: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch, event_ns: float, runs: int
) -> None:
    run, taken = stand_in.Replay.run, []

    def timed(*args: Any, **kwargs: Any) -> dict[str, Any]:
        taken.append(event_ns * (10 if not taken else len(taken)))  # the first has cold caches
        return run(*args, **kwargs) | {"ns_per_event": taken[-1]}

    monkeypatch.setattr(stand_in.Replay, "run", timed)
    (result,) = replay(traces / SMALL, "vramx")
    assert len(taken) == runs
    assert result.ns_per_event == sorted(taken)[runs // 2]


@pytest.mark.usefixtures("core")
def test_a_timeline_reaches_the_peak(traces: Path) -> None:
    (result,) = replay(traces / SMALL, "vramx", options=ReplayOptions(samples=100))
    assert result.timeline is not None
    assert result.timeline.live_bytes.max() == result.peak_live_bytes
    assert result.timeline.reserved_bytes.max() == result.peak_reserved_bytes
    assert (result.timeline.reserved_bytes >= result.timeline.live_bytes).all()
