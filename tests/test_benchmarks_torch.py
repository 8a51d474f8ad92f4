"""The benchmark of whole torch programs: order, caps, GPUs, rows and exit codes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from program_stand_ins import (
    FAKE,
    ON_CPU,
    PROGRAM,
    ROOT,
    Launched,
    launcher,
    machine_with,
    outcome,
    rows,
)

from benchmarks import torch_programs
from benchmarks.harness import RowWriter
from benchmarks.programs import _launch
from benchmarks.programs._launch import Job, Outcome
from benchmarks.programs._verdicts import Program
from vramx.sizes import GIB

TOY_GOOD, TOY_BAD = Program("good", has_fixed_shapes=True), Program("bad")


def test_every_program_is_in_the_catalogue() -> None:
    files = {path.stem for path in _launch.PROGRAMS.glob("[a-z]*.py")}
    assert files == {program.name for program in torch_programs.CATALOGUE}


REPORTS = """
import os, torch
from benchmarks.programs._report import Recorder
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # as by hand
Recorder(deterministic=False)
loose = torch.are_deterministic_algorithms_enabled()
recorder = Recorder(warmup=1, timed=2)
recorder.begin()
for _ in range(recorder.steps):
    with recorder.step():
        loss = torch.rand(()) / 3
    recorder.loss(loss)
recorder.finish(
    loose=loose,
    strict=torch.are_deterministic_algorithms_enabled(),
    warns=torch.is_deterministic_algorithms_warn_only_enabled(),
    fills=torch.utils.deterministic.fill_uninitialized_memory,
    workspace=os.environ["CUBLAS_WORKSPACE_CONFIG"],
)
"""


@pytest.mark.slow
def test_a_program_reports_through_the_recorder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.programs._report import SEED

    (tmp_path / "program.py").write_text(REPORTS)
    job = Job(tmp_path / "program.py", ON_CPU)
    reported = _launch.run(job)
    assert reported.status == "ok"
    report = reported.reports[-1]
    assert (len(report["step_ms"]), report["warmup"], report["driver_calls"]) == (3, 1, None)
    in_steps = _launch.run(replace(job, has_steps=True))
    assert in_steps.reports[-1]["losses"] == report["losses"]
    generator = torch.Generator().manual_seed(SEED)
    expected = [float(torch.rand((), generator=generator) / 3) for _ in range(3)]
    assert [float.fromhex(loss) for loss in report["losses"]] == expected  # to the last bit
    # Kernels repeat; with warn_only, torch keeps the atomic additions of attention's backward.
    flags = {"loose": False, "strict": True, "warns": False, "fills": False}
    assert report["extra"] == {**flags, "workspace": ":4096:8"}


def test_beginning_anew_draws_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.programs._report import Recorder

    recorder = Recorder(deterministic=False)
    first = torch.rand(3), recorder.random.random()
    torch.rand(5)  # as many as were drawn until the memory ran out
    recorder.restart()
    again = torch.rand(3), recorder.random.random()
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1]


def test_the_cap_becomes_a_fraction_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.programs import _report

    asked: list[tuple[float, int]] = []
    gpu = SimpleNamespace(total_memory=100 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given)
    )
    _report._cap_memory(None)
    assert asked == []
    _report._cap_memory(25 * GIB)
    assert asked == [(0.25, 0)]


def lane(
    writer: RowWriter, ended: Callable[[Launched], Outcome], repeats: int = 1
) -> torch_programs.Lane:
    return torch_programs.Lane(repeats, 60.0, writer, FAKE, launcher(ended))


def test_programs_run_in_turn_and_then_under_a_cap(writer: RowWriter, tmp_path: Path) -> None:
    turns: list[tuple[str, int | None, int]] = []

    def ended(launched: Launched) -> Outcome:
        turns.append((launched.job.allocator.name, launched.cap_bytes, writer.count))
        return outcome(launched.job.allocator.name)

    runs = list(lane(writer, ended, repeats=2).runs([Program("toy")], "0"))
    cap_bytes = int(1.03 * 10 * GIB)
    assert [(name, cap) for name, cap, _ in turns] == [
        *(("native", None), ("expandable", None), ("vramx", None)),
        *(("vramx", None), ("expandable", None), ("native", None)),
        *(("vramx", None), ("native", cap_bytes), ("expandable", cap_bytes), ("vramx", cap_bytes)),
    ]
    # Each process finds the rows of the rounds before it in the file.
    assert [count for *_, count in turns] == [0] * 3 + [21] * 3 + [42] * 4
    assert [run.is_capped for run in runs] == [False] * 7 + [True] * 3
    assert [run.round for run in runs] == [0] * 3 + [1] * 3 + [2] * 4
    cases = list(dict.fromkeys(row["case"] for row in rows(tmp_path)))
    assert cases[:4] == ["toy native 1", "toy expandable 1", "toy vramx 1", "toy vramx 2"]
    assert cases[-2:] == ["toy vramx capped", "toy goals"]
    steps = [row for row in rows(tmp_path) if row["metric"] == "step_ms"]
    assert {(row["samples"], row["median"]) for row in steps} == {("10 12", "11.0")}


def test_a_program_that_fills_the_gpu_has_it_alone() -> None:
    alone = Program("toy", shares_gpu=False)
    turns = list(torch_programs.plan(alone, 2, FAKE))
    assert [len(together) for together in turns] == [1] * 10
    assert [together[0].round for together in turns] == [0] * 3 + [1] * 3 + [2] * 4
    assert [len(each) for each in torch_programs.plan(Program("toy"), 2, FAKE)] == [3, 3, 4]


def test_a_program_with_its_own_cap_always_has_it(writer: RowWriter) -> None:
    caps = []

    def ended(launched: Launched) -> Outcome:
        caps.append(launched.cap_bytes)
        return outcome(launched.job.allocator.name, extra={"batch_size": 16})

    runs = list(lane(writer, ended).runs([Program("search", cap_bytes=GIB)], "0"))
    assert caps == [GIB] * 3
    assert not any(run.is_capped for run in runs)


def test_a_compiled_program_runs_once_before_it_counts(writer: RowWriter, tmp_path: Path) -> None:
    turns = []

    def ended(launched: Launched) -> Outcome:
        turns.append(launched.job.allocator.name)
        return good(launched)

    runs = list(lane(writer, ended).runs([Program("toy", compiles=True)], "0"))
    assert len(runs) == len(turns) - 1
    assert turns[:2] == ["native", "native"]
    assert sum(row["metric"] == "step_ms" for row in rows(tmp_path)) == len(turns) - 1


def test_all_runs_of_a_program_stay_on_one_gpu(writer: RowWriter) -> None:
    used: dict[str, set[str | None]] = {}
    meeting = threading.Barrier(2, timeout=30)

    def ended(launched: Launched) -> Outcome:
        job = launched.job
        if job.script.stem not in used:
            meeting.wait()  # only two programs at once get past here
        used.setdefault(job.script.stem, set()).add(job.gpu)
        return outcome(launched.job.allocator.name)

    programs = [Program(name) for name in "abcd"]
    runs = torch_programs.spread(programs, ["5", "6"], lane(writer, ended))
    assert [run.program.name for run in runs[::7]] == ["a", "b", "c", "d"]
    assert all(len(gpus) == 1 for gpus in used.values())
    assert set().union(*used.values()) == {"5", "6"}


def test_what_goes_wrong_outside_of_a_program_stops_all(writer: RowWriter) -> None:
    def ended(launched: Launched) -> Outcome:
        if launched.job.script.stem == "a":
            raise OSError("no space left")
        assert launched.stop.wait(30)
        return outcome(status="failed: stopped")

    with pytest.raises(OSError, match="no space left"):
        torch_programs.spread([Program("a"), Program("b")], ["0", "1"], lane(writer, ended))
    assert writer.count == 0


def good(launched: Launched) -> Outcome:
    return outcome(launched.job.allocator.name)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalogue of one good and one bad program, on a machine with two GPUs."""
    (tmp_path / "good.py").write_text(PROGRAM)
    (tmp_path / "bad.py").write_text("import sys\nsys.exit('it does not work')\n")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch_programs, "PROGRAMS", tmp_path)
    monkeypatch.setattr(torch_programs, "CATALOGUE", (TOY_GOOD, TOY_BAD))
    monkeypatch.setattr(torch_programs.Lane.__init__, "__defaults__", (FAKE, _launch.Started))
    monkeypatch.setattr(_launch, "load_core", machine_with(2))
    return tmp_path


def test_the_command_writes_rows_and_shows_the_verdicts(toys: Path, run: Any) -> None:
    arguments = ["--only", "good", "--repeats", "2", "-o", toys / "rows.csv"]
    code, shown, _ = run("bench", "torch_programs", *arguments)
    assert code == 0
    assert "good" in shown
    assert "MISSED" not in shown
    found = rows(toys)
    assert {row["status"] for row in found} == {"ok"}
    assert found[0]["command"] == "vramx bench torch_programs --only good --repeats 2"
    caps = [float(row["median"]) for row in found if row["metric"] == "cap"]
    assert caps == [0] * 7 + [int(1.03 * 10 * GIB)] * 3


def test_the_command_fails_when_a_program_does(toys: Path, run: Any) -> None:
    arguments = ["--jobs", "2", "--repeats", "1", "-o", toys / "rows.csv"]
    code, _, said = run("bench", "torch_programs", *arguments)
    assert code == 1
    assert "bad native 1: failed: it does not work" in said
    statuses = {row["case"].split()[0]: row["status"] for row in rows(toys)}
    assert statuses == {"good": "ok", "bad": "failed: it does not work"}


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--jobs", "3"], ["--jobs", "0"]])
def test_the_command_refuses_what_is_not_there(toys: Path, run: Any, arguments: list[str]) -> None:
    code, _, said = run("bench", "torch_programs", *arguments, "-o", toys / "rows.csv")
    assert code == 2
    assert "accepted are" in said
    assert not (toys / "rows.csv").exists()
