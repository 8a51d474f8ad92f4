"""Recording traces: from torch's history to a file, and the programs that are recorded."""

from __future__ import annotations

import csv
import importlib
import json
import math
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_stand_ins import machine_with
from samples import event, rows, segment

from benchmarks import record_traces
from benchmarks.programs import _launch
from benchmarks.programs._launch import Outcome
from vramx.errors import TraceError
from vramx.memory.trace import FREE_COMPLETED, Trace, load_trace

torch = pytest.importorskip("torch")
from benchmarks.programs import _record  # noqa: E402

NAMES = sorted(record_traces.programs())
OK = {"case": "a", "allocator": "native", "events": 7, "seconds": 1.5, "is_whole": True}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return what makes a snapshot file torch's history."""

    def record(snapshot: Path) -> None:
        copy = partial(shutil.copy, snapshot)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", copy)

    return record


# --- from a history to a file ---------------------------------------------------------------------


def test_a_history_becomes_requested_bytes_on_numbered_streams(
    recorded: Callable[[Path], None], tmp_path: Path
) -> None:
    side = 0x7F00_1000
    events = [
        event("segment_alloc", 0x1000, 2 << 20),
        event("alloc", 0x1000, 100),
        event("alloc", 0x2000, 700, 300, stream=side),
        event("free_requested", 0x2000, 700, 599, stream=side),
        event("alloc", 0x3000, 4, 600),
        event("free_completed", 0x2000, 700, 951, stream=side),
    ]
    snapshot = {"segments": [segment()], "device_traces": [events]}
    (tmp_path / "snapshot").write_bytes(pickle.dumps(snapshot))
    recorded(tmp_path / "snapshot")
    trace = _record.history()
    assert rows(trace) == [
        (0, 0, 100, 0, 0),
        (0, 1, 700, 1, 300),
        (1, 1, 700, 1, 500),
        (0, 2, 4, 0, 600),
        (2, 1, 700, 1, 900),
    ]
    assert _record.describe(trace) | {"modelled_peak_reserved_bytes": 0} == {
        "events": 5,
        "allocations": 3,
        "streams": 2,
        "seconds": 9e-4,
        "peak_live_bytes": 804,
        "modelled_peak_reserved_bytes": 0,
    }


def test_a_trace_that_frees_twice_is_refused() -> None:
    ops, zeros = np.array([0, FREE_COMPLETED, FREE_COMPLETED], np.uint8), np.zeros(3, np.uint32)
    sizes, streams = np.full(3, 512, np.uint64), np.zeros(3, np.uint8)
    twice = Trace("t", ops, zeros, sizes, streams, zeros.copy())
    with pytest.raises(TraceError):
        _record.describe(twice)


# --- the process of a program ---------------------------------------------------------------------


def test_a_program_leaves_its_trace_and_its_facts(
    monkeypatch: pytest.MonkeyPatch,
    recorded: Callable[[Path], None],
    snapshots: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[dict[str, Any]] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "init", lambda: None)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda: 123)
    monkeypatch.setattr(cuda.memory, "_record_memory_history", lambda **each: asked.append(each))
    recorded(snapshots / "train.pickle")
    program = tmp_path / "toy.py"
    program.write_text("assert __name__ == '__main__'; print('it ran')")
    _record.main([str(program), str(tmp_path), "60"])
    said = capsys.readouterr().out.splitlines()
    facts = json.loads(said[-1])
    assert said[0] == "it ran"
    assert asked == [{"context": None, "max_entries": _record.MAX_EVENTS}]
    assert (facts["case"], facts["is_whole"]) == ("toy", True)
    assert (facts["events"], facts["native_peak_reserved_bytes"]) == (4120, 123)
    assert len(load_trace(tmp_path / "toy.npz")) == 4120


def test_a_program_is_stopped_when_its_time_is_over(tmp_path: Path) -> None:
    program = tmp_path / "endless.py"
    # Whatever it catches of its own.
    program.write_text("while True:\n    try:\n        sum(range(1000))\n    except Exception: 0\n")
    assert not _record.run(program, 0.2)
    program.write_text("pass")
    assert _record.run(program, 60)


def test_a_programs_own_error_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("raise ValueError('its own')")
    with pytest.raises(ValueError, match="its own"):
        _record.run(tmp_path / "wrong.py", 60)


# --- all of them ----------------------------------------------------------------------------------


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    outcomes = {
        "a": Outcome("ok", ({"other": 1}, OK), 1.0),
        "b": Outcome("failed: out of memory", (), 1.0),
        "c": Outcome("ok", (OK,), 1.0),
    }
    lines = list(record_traces.record("abc", tmp_path, outcomes.__getitem__, jobs=2))
    assert [line.status for line in lines] == ["ok", "failed: out of memory", "ok"]
    assert (lines[0].events, lines[0].seconds, lines[0].is_whole) == (7, 1.5, True)
    assert str(lines[1]) == "b: failed: out of memory"
    with (tmp_path / "traces.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["trace"] for row in table] == ["a", "b", "c"]
    assert {"gpu", "driver", "torch", "commit"} <= set(table[0])


def test_the_command_records_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_launch, "load_core", machine_with(0))
    assert record_traces.main(["--out", str(tmp_path / "new")]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_unknown_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record_traces.main(["--out", str(tmp_path), "--only", "x"]) == 2
    assert "program 'x' is unknown; accepted are diffusion_buckets" in capsys.readouterr().err


# --- the programs ---------------------------------------------------------------------------------


def losses_of(name: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    importlib.import_module(f"benchmarks.programs.recorded.{name}").main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    return [float.fromhex(loss) for loss in report["losses"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_program_runs_and_repeats_itself(
    name: str, one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROGRAM_SIZE", "tiny")
    first = losses_of(name, capsys)
    assert len(first) == 3
    assert all(math.isfinite(loss) for loss in first)
    assert len(set(first)) == 3
    assert losses_of(name, capsys) == first
