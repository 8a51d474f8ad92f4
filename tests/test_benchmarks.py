"""The benchmark harness keeps every row, a crash included, and publishes nothing private."""

from __future__ import annotations

import csv
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_processes import python

from benchmarks import core, harness, machine, traces
from benchmarks.programs import _cases, _launch
from vramx.cli.main import main
from vramx.memory.trace import ALLOCATE, FREE_REQUESTED, load_trace

ROOT = Path(__file__).resolve().parent.parent
# A benchmark whose cases end in every way that a case can end.
STUB = """
import os, signal, sys, time
from benchmarks.harness import Measurement, UnavailableError
DESCRIPTION = "stub"
def cases(options):
    if options.driver == "cuda":
        raise UnavailableError("it needs a GPU")
    return ["good", "raises", "crashes", "exits"]
def measure(case, options):
    print("noise on stdout")
    if case == "raises":
        raise RuntimeError("no such thing in " + os.getcwd() + "/here")
    if case == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "exits":
        os._exit(3)
    if case == "hangs":
        time.sleep(60)
    return [Measurement("time", "ns", [3.0, 1.0, 2.0]), Measurement("size", "B", [8.0])]
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own whose only benchmark is the stub."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    for name in ("__init__", "harness", "machine"):
        (package / f"{name}.py").write_text((ROOT / "benchmarks" / f"{name}.py").read_text())
    (package / "stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "vramx", "bench", *arguments, cwd=folder)


def test_every_case_leaves_a_row(stub: Path) -> None:
    done = bench(stub, "stub")
    assert done.returncode == 1, done.stderr
    rows = harness.read_csv(stub / "benchmarks" / "results" / "stub.csv")
    assert [(row["case"], row["metric"], row["status"]) for row in rows] == [
        ("good", "time", "ok"),
        ("good", "size", "ok"),
        ("raises", "", "failed: RuntimeError: no such thing in here"),
        ("crashes", "", "failed: killed by SIGSEGV"),
        ("exits", "", "failed: exit code 3"),
    ]
    assert (rows[0]["median"], rows[0]["repeats"], rows[0]["samples"]) == ("2.0", "3", "3 1 2")
    assert (rows[0]["p10"], rows[0]["p90"]) == ("1.2", "2.8")
    assert rows[2]["median"] == ""


def test_what_rows_of_a_run_share_stands_once_in_a_file(tmp_path: Path) -> None:
    target = tmp_path / "rows.csv"
    here = machine.describe_machine(ROOT)
    first, second = (harness._RowMaker("b", here, f"vramx bench b {word}") for word in "xy")
    written = []
    for maker, value in ((first, 1 / 3), (first, 2e10 + 1), (second, 3.0)):
        written += maker.rows(f"{value}, case", [harness.Measurement("m", "B", [value])], "ok")
        harness.append_csv(target, written[-1:])
    with target.open(newline="") as file:
        assert [row["run"] != "" for row in csv.DictReader(file)] == [True, False, True]
    kept = harness.read_csv(target)
    for row, again in zip(written, kept, strict=True):
        values = [float(again.pop(name)) for name in ("median", "p10", "p90")]
        assert values == pytest.approx([row.median] * 3, rel=1e-14, abs=0)
        assert again == {name: str(getattr(row, name)) for name in again}
    rows = harness.read_csv(target)
    harness.write_csv(target, rows)
    assert harness.read_csv(target) == rows


def test_a_case_that_hangs_is_a_failed_row(stub: Path) -> None:
    run = "run_case('stub', 'hangs', Options(), 0.5)"
    done = python("-c", f"from benchmarks.harness import *; print({run}[1])", cwd=stub)
    assert done.stdout.strip() == "failed: no result after 0 s"


def test_rows_say_what_was_measured_on_and_nothing_private(stub: Path) -> None:
    assert bench(stub, "stub", "--traces", str(stub / "benchmarks")).returncode == 1
    row = harness.read_csv(stub / "benchmarks" / "results" / "stub.csv")[0]
    assert row["command"] == "vramx bench stub --traces benchmarks"
    assert int(row["cores"]) == len(os.sched_getaffinity(0))
    assert all(row[column] for column in ("cpu", "gpu", "driver", "torch", "python", "date_utc"))
    text = " ".join(row.values())
    for private in (str(stub), str(ROOT), socket.gethostname(), str(Path.home())):
        assert private not in text
    assert getpass.getuser() not in text.split()


def test_rows_are_appended_and_foreign_columns_refused(stub: Path) -> None:
    target = stub / "out.csv"
    bench(stub, "stub", "-o", str(target))
    bench(stub, "stub", "-o", str(target))
    assert len(harness.read_csv(target)) == 10
    target.write_text("a,b\n1,2\n")
    done = bench(stub, "stub", "-o", str(target))
    assert done.returncode == 2
    assert "other columns" in done.stderr
    assert target.read_text() == "a,b\n1,2\n"


def test_a_benchmark_that_cannot_run_here_is_left_out_and_without_a_name_all_are_listed(
    stub: Path,
) -> None:
    done = bench(stub, "stub", "--driver", "cuda")
    assert done.returncode == 0
    assert "left out: it needs a GPU" in done.stderr
    assert not (stub / "benchmarks" / "results").exists()
    assert bench(stub).stdout.split() == ["stub", "stub"]


def test_all_benchmarks_end_with_what_the_documentation_says_of_their_figures(stub: Path) -> None:
    shutil.copytree(ROOT / "benchmarks" / "documents", stub / "benchmarks" / "documents")
    (stub / "benchmarks" / "documents" / "tables.ini").write_text(
        "[shown]\nof = stub, program\nrows = good\ncolumns =\n    time | {} | time | .1f ns\n"
        "[gone]\nof = stub, program\nrows = lost\ncolumns =\n    time | {} | time | .1f ns\n"
    )
    before = [harness.Measurement("time", "ns", [4.0])]
    path = stub / "benchmarks" / "results" / "stub.csv"
    harness.RowWriter("stub", "vramx bench stub", path, lambda row: None).write("good", before)
    done = bench(stub, "all")
    assert done.returncode == 1, done.stderr  # of the cases that fail
    told = done.stdout.split("what the documentation says")[1]
    [line] = [each.split() for each in told.splitlines() if " good " in f" {each} "]
    assert line[:6] == ["stub", "good", "time", "4", "2", "0.500"]
    assert "size" not in told  # no page shows it


def test_a_quick_run_has_each_benchmark_once_and_a_quoted_one_after_the_other() -> None:
    assert harness.rounds(False) == [(harness.names(), 1)]
    quick = harness.rounds(True)
    assert sorted(name for names, _ in quick for name in names) == harness.names()
    [alone] = [names for names, at_once in quick if at_once == 1]
    # The host sets their pace: whatever imports beside them is in their figures.
    assert {"core", "hooks", "soak", "torch_calls", "torch_programs"} <= set(alone)


def test_benchmarks_that_prepare_beside_each_other_measure_in_turn(tmp_path: Path) -> None:
    both, at_once, most = threading.Barrier(2), [], []

    class Process:
        def wait_until_ready(self, stop: threading.Event) -> None:
            both.wait(10)  # prepared beside each other, or this ends

        def take_turn(self) -> _launch.Outcome:
            at_once.append(self)
            most.append(len(at_once))
            time.sleep(0.05)
            at_once.remove(self)
            return _launch.Outcome("ok", (), 0.0)

        def cancel(self) -> None: ...

    def run(name: str) -> None:
        path = tmp_path / f"{name}.csv"
        writer = harness.RowWriter(name, f"vramx bench {name}", path, lambda row: None)
        _cases.measure([name], lambda case: Process(), writer)  # type: ignore[arg-type,return-value]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, ("one", "other")))
    assert most == [1, 1]


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("/", "core", "from the root of a checkout"),
        (ROOT, "../core", "accepted are ablations, activations, "),
    ],
)
def test_what_cannot_be_run_here_is_refused(
    folder: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    assert main(["bench", name]) == 2
    assert said in capsys.readouterr().err


def test_traces_has_a_case_for_each_trace_and_policy() -> None:
    pytest.importorskip("vramx._core", reason="the compiled core is not built")
    found = traces.cases(harness.Options())
    assert "llama_varlen vramx" in found
    assert "offload_streams expandable" in found
    assert len(found) == len(traces.trace_files(harness.Options())) * len(traces.POLICIES)


def test_traces_compares_with_the_live_bytes_and_blocks(stand_in: Any) -> None:
    found = traces.measure("offload_streams vramx", harness.Options(quick=True))
    figures = {item.metric: item.values[0] for item in found}
    # The stand-in reserves whole chunks of 2 MiB, and says what an event and its memory take.
    assert 1.0 <= figures["peak_reserved_ratio"] < 1.001
    assert figures["ns_per_event"] == 50.0
    assert figures["driver_share"] > figures["driver_share_second_half"] == 0.0
    trace = load_trace(traces.trace_files(harness.Options())["offload_streams"])
    live, most = 0, 0
    for op in trace.op:
        live += {ALLOCATE: 1, FREE_REQUESTED: 0}.get(int(op), -1)
        most = max(most, live)
    assert figures["host_bytes"] == 6400.0
    assert figures["host_bytes_per_block"] == 6400.0 / most


def test_a_replay_that_corrupts_memory_is_a_failure(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stand_in.Replay.run
    monkeypatch.setattr(
        stand_in.Replay, "run", lambda *args, **named: {**run(*args, **named), "mismatches": 2}
    )
    with pytest.raises(RuntimeError, match="2 blocks changed"):
        traces.measure("offload_streams vramx", harness.Options(quick=True))


def test_core_asks_for_every_load_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def benchmark_core(**load: int) -> dict[str, float]:
        asked.append(load)
        return {"ns_per_operation": 40.0, "bytes_per_block": 64.0}

    monkeypatch.setattr(core, "load_core", lambda: SimpleNamespace(benchmark_core=benchmark_core))
    for case in core.cases(harness.Options()):
        found = core.measure(case, harness.Options())
        assert [item.metric for item in found] == ["ns_per_operation", "bytes_per_block"]
        assert [len(item.values) for item in found] == [7, 7]
    assert {load["live_blocks"] for load in asked} == set(core.LIVE_BLOCKS)
    assert {load["threads"] for load in asked} == set(core.THREADS)
    assert all(load["operations"] >= 4 * load["live_blocks"] for load in asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["core", "traces"])
def test_the_real_benchmarks_run(name: str, tmp_path: Path) -> None:
    pytest.importorskip("vramx._core", reason="the compiled core is not built")
    target = tmp_path / f"{name}.csv"
    few = ["--traces", str(ROOT / "vramx/demo")] if name == "traces" else []
    done = bench(ROOT, name, "--quick", *few, "-o", str(target))
    assert done.returncode == 0, done.stderr
    rows = harness.read_csv(target)
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["median"]) >= 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("traces", {"a vramx": "peak_reserved_ratio", "b vramx": "min_capacity_ratio"}),
        ("core", {"live=1000": "ns_per_operation", "threads=2": "ns_per_operation"}),
        ("language_model", {"exact": "validation_loss_at_250", "int8": "packed_share"}),
        ("other", {"x": "one", "y": "two"}),
    ],
)
def test_each_benchmark_has_its_picture(name: str, cases: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    here = machine.describe_machine(ROOT)
    maker = harness._RowMaker(name, here, f"vramx bench {name}")
    measured = {case: [harness.Measurement(metric, "1", [1.01])] for case, metric in cases.items()}
    target = tmp_path / f"{name}.csv"
    harness.append_csv(target, [r for c, m in measured.items() for r in maker.rows(c, m, "ok")])
    assert plot.main([str(target), "-o", str(tmp_path.parent)]) == 0
    assert (tmp_path.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_that_another_is_left_of_and_below_is_not_on_the_front() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import pareto_front

    points = [(3.0, 5.0), (2.0, 9.0), (1.0, 9.0), (4.0, 6.0), (5.0, 1.0)]
    assert pareto_front(points) == [(1.0, 9.0), (3.0, 5.0), (5.0, 1.0)]


def test_the_last_of_each_figure_is_drawn_where_the_last_run_was() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import PLACE, latest

    def row(day: int, commit: str, case: str, status: str = "ok") -> dict[str, str]:
        place = dict.fromkeys(PLACE, "") | {"commit": commit}
        date = {"date_utc": f"2026-01-0{day}T00:00:00Z", "status": status}
        return {"case": case, "metric": "m"} | place | date

    kept, newest = row(2, "b", "kept"), row(3, "b", "again")
    older = [row(1, "a", "kept"), row(1, "a", "of another commit"), row(2, "b", "again")]
    assert latest([*older, kept, newest, row(3, "b", "bad", "failed: x")]) == [newest, kept]
    assert latest([]) == []


def test_a_folder_that_is_no_repository_has_an_unknown_commit(tmp_path: Path) -> None:
    found = machine.describe_machine(tmp_path)
    assert (found.commit, found.dirty) == ("unknown", "unknown")
