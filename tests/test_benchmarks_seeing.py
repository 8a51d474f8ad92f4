"""The benchmark of seeing memory: which processes run at a time, and what its programs do.

The programs run on a processor: what they provoke and report.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from program_stand_ins import FakeProcess, line, machine_with, run_tiny
from samples import recorded_snapshot

from benchmarks import seeing
from benchmarks.harness import Options, Request, RowWriter
from benchmarks.programs import _cases, _launch
from benchmarks.programs._launch import Job, Outcome
from vramx.sizes import GIB, MIB


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[Job]]:
    """Have processes end at once, and note which ran at the same time."""
    found: list[list[Job]] = []

    def ended(job: Job) -> Outcome:
        said = {**line(" ".join(job.arguments), "x", 1.0), "allocator": job.allocator.name}
        return Outcome("ok", (said,), 1.0)

    def start(job: Job) -> FakeProcess:
        found.append([job])
        return FakeProcess(job, lambda _: ended(job))

    def at_once(items: Any, work: Any, stop: threading.Event) -> list[Outcome]:
        found.append([])
        return [work(item) for item in items]

    def run(job: Job, stop: Any = None) -> Outcome:
        found[-1].append(job)
        return ended(job)

    monkeypatch.setattr(seeing, "Started", start)
    monkeypatch.setattr(_cases, "at_once", at_once)
    monkeypatch.setattr(_launch, "run", run)
    monkeypatch.setattr(_launch, "load_core", machine_with(1))
    return found


def run(writer: RowWriter, *groups: str, quick: bool = False) -> None:
    seeing.run_all(Options(quick=quick), Request(only=groups), writer)


def test_predictions_see_no_gpu(writer: RowWriter, launched: list[Any]) -> None:
    run(writer, "predict")
    jobs = [job for part in launched for job in part]
    said = [job for job in jobs if job.arguments[-1] == "said"]
    held = [job for job in jobs if job.arguments[-1] == "held"]
    assert len(said) == len(held) == 18
    assert {job.gpu for job in said} == {""}
    assert {job.gpu for job in held} == {"0"}
    assert max(len(part) for part in launched if part[0] in held) == seeing.HELD_AT_ONCE


def test_who_takes_all_of_the_gpu_runs_alone(writer: RowWriter, launched: list[Any]) -> None:
    run(writer, "confirm")
    first, last = launched
    assert [job.arguments for job in last] == [("another_process",)]
    assert len(first) == len(seeing.KINDS) - 1


@pytest.mark.parametrize("group", seeing.GROUPS)
def test_a_quick_run_has_fewer_cases(writer: RowWriter, launched: list[Any], group: str) -> None:
    run(writer, group)
    all_of_it = sum(map(len, launched))
    launched.clear()
    run(writer, group, quick=True)
    assert 0 < sum(map(len, launched)) < all_of_it


# --- the programs ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in seeing.KINDS if k not in ("pool", "rank")])
def test_a_kind_needs_more_of_torchs_allocator_and_most_where_that_fails(kind: str) -> None:
    """The programs are predicted, replayed at the limit that is tried, and cut where it fails."""
    import numpy as np

    from benchmarks.programs import _ooms
    from benchmarks.programs._seeing_confirm import SHARES
    from vramx.memory.replay import replay

    trace = trace_of(_ooms.KINDS[kind])
    (free,) = replay(trace, "native", min_capacity=True)
    assert free.min_capacity_bytes is not None
    assert 900 * MIB < free.min_capacity_bytes < 3 * GIB
    limit = int(SHARES[0] * free.min_capacity_bytes)
    (failed,) = replay(trace, "native", capacity=limit)
    assert failed.oom
    until = trace.part(np.arange(failed.oom_event + 1))
    (said,), (held,) = (replay(each, "vramx", capacity=limit) for each in (until, trace))
    assert not said.oom
    assert not held.oom
    assert held.peak_reserved_bytes <= (1 + seeing.CONFIRM_GOAL / 2) * said.peak_reserved_bytes


def trace_of(program: Any) -> Any:
    """Return what a program allocates, without a GPU."""
    import vramx
    from vramx.planning import predict

    found, replayed = [], predict.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            predict, "replay", lambda trace, names: (found.append(trace), replayed(trace, names))[1]
        )
        vramx.predict(program, steps=1, policies="native")
    return found[0]


def test_a_provoked_failure_is_explained_and_each_remedy_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.programs import _seeing_confirm, _turn

    monkeypatch.delenv(_turn.TURN, raising=False)
    said: list[list[str]] = []

    def run(words: Any, settings: Any, *, fails: bool = False) -> Any:
        said.append(list(words))
        if "--record" in words and "run" not in words:
            Path(words[-1]).write_bytes(recorded_snapshot("oom"))
            return done(0)
        if "run" in words:
            is_first = sum("run" in each for each in said) == 1
            if not is_first:
                written = Path(settings["VRAMX_OOM_DIR"], "oom-1.pickle")
                written.write_bytes(recorded_snapshot("oom"))
            return done(0 if is_first else 1)
        remedy = {"policy": "vramx", "expected_bytes": 100, "exit_code": 0, "is_under_it": True}
        broken = {**remedy, "policy": "expandable", "exit_code": 1, "measured_bytes": None}
        confirmed = [{**remedy, "measured_bytes": 101}, broken]
        return done(1, json.dumps({"cause": "size", "confirmed": confirmed}))

    monkeypatch.setattr(_seeing_confirm, "run", run)
    _seeing_confirm.main("leak")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    figures = {line["metric"]: line["values"] for line in lines if "metric" in line}
    assert figures["limit_bytes"] == [int(_seeing_confirm.SHARES[1] * figures["needed_bytes"][0])]
    assert figures["remedies"] == [2]
    assert figures["cause_size"] == [1]
    assert figures["vramx_off"] == [pytest.approx(0.01)]
    assert [line["status"] for line in lines if "status" in line] == [
        "failed: under expandable it ended with 1"
    ]
    explain = said[-1]
    assert explain[explain.index("--capacity") + 1] == str(figures["limit_bytes"][0])
    assert explain[-2:] == [_seeing_confirm.SCRIPT, "leak"]


def done(code: int, stdout: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, stdout, "")


@pytest.fixture
def on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs record the host's memory, and torch's counters say what that says."""
    import torch
    from cpu_history import CpuHistory

    from benchmarks.programs import _turn
    from vramx.memory import record

    monkeypatch.delenv(_turn.TURN, raising=False)
    monkeypatch.setattr(record, "CudaHistory", CpuHistory)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def figures_in(text: str) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["metric"]: line["values"] for line in lines if "metric" in line}


def test_a_program_is_timed_with_and_without_a_recording(
    on_a_processor: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.programs import _seeing_overhead

    started: list[dict[str, str]] = []

    def history(**arguments: str) -> contextlib.AbstractContextManager[None]:
        started.append(arguments)
        return contextlib.nullcontext()

    monkeypatch.setattr(_seeing_overhead, "history", history)
    monkeypatch.setattr(_seeing_overhead, "ROUNDS_OF_HOST_BOUND", 2)
    monkeypatch.setattr(_seeing_overhead, "STEPS_OF_HOST_BOUND", 4)
    _seeing_overhead.main("small_layers")
    figures = figures_in(capsys.readouterr().out)
    ways = ("never", "off", "on", "history", "history_python")
    assert all(len(figures[f"{way}_ms"]) == 2 for way in ways)
    assert sorted(started, key=len) == [{}, {}, {"stacks": "python"}, {"stacks": "python"}]
    assert figures["events"][0] > 100
    assert figures["hooks_left"] == [0]
    judged = {("overhead small_layers", metric): values for metric, values in figures.items()}
    metrics = [each.metric for each in seeing.judge_overhead(judged)]
    assert metrics == ["hooks_left", "event_of_torchs", "event_of_stacks"]


def test_sums_are_compared_with_counters(
    on_a_processor: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from benchmarks.programs import _seeing_models, _seeing_sums

    counted = {"requested_bytes.all.peak": 7, "allocated_bytes.all.peak": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: counted)
    monkeypatch.setattr(_seeing_sums, "used_bytes", lambda: 1 * GIB)
    monkeypatch.setitem(_seeing_models.SUMMED, "llama", _seeing_models.small_layers)
    monkeypatch.setitem(sys.modules, "torchvision", torch)
    monkeypatch.setitem(sys.modules, "transformers", torch)
    _seeing_sums.main("llama")
    figures = figures_in(capsys.readouterr().out)
    parts = [values[0] for name, values in figures.items() if name.endswith("s_bytes")]
    sums = figures["categories_bytes"][0]
    assert sum(parts) >= 2 * sums > 0  # its categories, and the sum of them
    assert figures["requested_left_bytes"] == [7 - sums]
    assert figures["allocated_left_bytes"] == [9 - figures["blocks_bytes"][0]]
    assert figures["device_off"] == [figures["device_said_bytes"][0] / GIB - 1]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("name", "row"), [("llama", "amp"), ("llama", "checkpoint"), ("gpt2", "int8")]
)
def test_a_row_is_predicted_without_a_gpu(name: str, row: str) -> None:
    program = f"_seeing_predict as p; p.main({name!r}, {row!r}, 'said')"
    lines = run_tiny(f"from benchmarks.programs import {program}")
    assert {(line["case"], line["allocator"]) for line in lines} == {
        (f"predict {name} {row}", "none")
    }
    requested, allocated, reserved = (line["values"][0] for line in lines)
    assert 64 * MIB < requested <= allocated <= reserved < GIB  # with the workspaces of cuBLAS
