"""The benchmark of seeing memory: its goals, and which of its processes run at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from program_stand_ins import FakeProcess, line, machine_with

from benchmarks import seeing
from benchmarks.harness import Options, Request, RowWriter
from benchmarks.programs import _cases, _launch
from benchmarks.programs._cases import Figures
from benchmarks.programs._launch import Job, Outcome
from vramx.sizes import GIB

SUMS, PREDICT = "sums llama native", "predict llama int8"
TIMED, HOST = "overhead resnet50", "overhead small_layers"

GOOD: dict[str, Figures] = {
    "sums": {
        (SUMS, "categories_bytes"): [3.0 * GIB],
        (SUMS, "requested_left_bytes"): [0],
        (SUMS, "allocated_left_bytes"): [0],
        (SUMS, "device_off"): [-0.019],
    },
    "predict": {
        (PREDICT, "said_bytes"): [1.029 * GIB],
        (PREDICT, "held_bytes"): [1.0 * GIB],
        (PREDICT, "said_allocated_bytes"): [1.029 * GIB],
        (PREDICT, "held_allocated_bytes"): [1.0 * GIB],
    },
    "confirm": {
        key: value
        for kind in range(10)
        for key, value in {
            (f"confirm {kind}", "remedies"): [2.0],
            (f"confirm {kind}", "expandable_off"): [0.019],
            (f"confirm {kind}", "vramx_off"): [-0.019],
        }.items()
    },
    "overhead": {
        (TIMED, "never_ms"): [100.0, 101.0, 99.0],
        (TIMED, "off_ms"): [100.0, 150.0, 100.0],  # a machine that is slow for a round
        (TIMED, "on_ms"): [102.9, 154.0, 102.0],
        (TIMED, "hooks_left"): [0],
        (HOST, "off_ms"): [10.0, 10.0, 10.0],
        (HOST, "on_ms"): [14.0, 14.0, 14.0],
        (HOST, "history_ms"): [15.0, 14.0, 14.0],
        (HOST, "history_python_ms"): [12.0, 12.0, 12.0],
        (HOST, "hooks_left"): [0],
    },
}


def missed(group: str, figures: Figures) -> list[str]:
    return [each.metric for each in seeing.GROUPS[group][1](figures) if not each.is_met]


@pytest.mark.parametrize("group", seeing.GROUPS)
def test_good_figures_meet_every_goal(group: str) -> None:
    found = list(seeing.GROUPS[group][1](GOOD[group]))
    assert found
    assert all(each.is_met for each in found), found


@pytest.mark.parametrize(
    ("group", "case", "metric", "values", "names"),
    [
        ("sums", SUMS, "requested_left_bytes", [1], ["requested_left_bytes"]),
        ("sums", SUMS, "allocated_left_bytes", [-512], ["allocated_left_bytes"]),
        ("sums", SUMS, "device_off", [0.021], ["device_off"]),
        ("predict", PREDICT, "held_bytes", [1.07 * GIB], ["predicted_off"]),
        ("predict", PREDICT, "said_bytes", [], ["predicted_off"]),
        ("predict", PREDICT, "held_allocated_bytes", [1.07 * GIB], ["predicted_allocated_off"]),
        ("confirm", "confirm 3", "vramx_off", [0.021], ["vramx_off", "kinds_confirmed"]),
        ("confirm", "confirm 3", "remedies", [3.0], ["kinds_confirmed"]),
        ("confirm", "confirm 3", "remedies", [0.0], ["kinds_confirmed"]),
        ("overhead", TIMED, "on_ms", [104.0, 156.0, 104.0], ["on_of_off"]),
        ("overhead", TIMED, "never_ms", [98.0, 98.0, 98.0], ["off_of_never"]),
        ("overhead", TIMED, "hooks_left", [1], ["hooks_left"]),
        ("overhead", HOST, "on_ms", [14.1, 14.1, 14.1], ["event_of_torchs"]),
        ("overhead", HOST, "history_ms", [], ["event_of_torchs"]),
        ("overhead", HOST, "history_python_ms", [], ["event_of_stacks"]),
    ],
)
def test_each_goal_can_be_missed(
    group: str, case: str, metric: str, values: list[float], names: list[str]
) -> None:
    assert missed(group, {**GOOD[group], (case, metric): values}) == names


def test_what_was_not_measured_is_missed_and_an_unknown_device_is_not_judged() -> None:
    without = {key: values for key, values in GOOD["sums"].items() if key[1] == "categories_bytes"}
    assert missed("sums", without) == ["requested_left_bytes", "allocated_left_bytes"]
    missing = ["predicted_off", "predicted_allocated_off"]
    assert missed("predict", {(PREDICT, "held_bytes"): [1.0]}) == missing
    assert missed("confirm", {}) == ["kinds_confirmed"]


# --- processes ------------------------------------------------------------------------------------


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
