"""vramx.replay as a library: arguments, progress, timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples import SMALL

import vramx
from vramx.errors import InvalidValueError, TraceError
from vramx.memory import ReplayOptions, replay


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
