"""The benchmark of programs of several streams: its turns, its rows and its verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from program_stand_ins import FAKE, FakeProcess, rows

from benchmarks import streams
from benchmarks.harness import RowWriter
from benchmarks.programs._cases import Figures, lines_of
from benchmarks.programs._launch import Job, Outcome, Together
from vramx.sizes import GIB

REPORT = {"fresh": 1.0, "kept": 0.8, "in_turn": 2.0}
PEAKS = {"peak_reserved": 2 * GIB, "peak_allocated": GIB}


def line(case: str, name: str, **changes: Any) -> dict[str, Any]:
    return {"case": case, "allocator": name, **REPORT, **PEAKS, **changes}


def together(case: str, outcomes: dict[str, Outcome]) -> Together:
    """Return what stands for a case's processes, which end as they are told to."""

    job = Job(streams.CHILD, FAKE[0], (case,))
    return Together([FakeProcess(job, lambda _, n=a.name: outcomes[n]) for a in FAKE])


def good(case: str, name: str, **changes: Any) -> Outcome:
    return Outcome("ok", (line(case, name), line(case, name, **changes)), 1.0)


def figures_of(**seconds_and_bytes: tuple[float, float]) -> Figures:
    """Return the figures of one case, by allocator."""
    found: Figures = {}
    for name, (seconds, reserved) in seconds_and_bytes.items():
        found["prefetch " + name, "seconds"] = [9.0, seconds, 0.1]  # of which it is the median
        found["prefetch " + name, "peak_reserved_bytes"] = [reserved]
    return found


def test_each_round_becomes_a_value_of_each_row(writer: RowWriter, tmp_path: Path) -> None:
    def start(case: str) -> Together:
        return together(case, {each.name: good(case, each.name, fresh=1.6) for each in FAKE})

    figures, has_failed = streams.measure(["prefetch"], start, writer, FAKE)
    assert not has_failed
    found = {(row["case"], row["metric"]): row for row in rows(tmp_path)}
    assert {case for case, _ in found} == {f"prefetch {each.name}" for each in FAKE}
    ours = {metric: row["samples"] for (case, metric), row in found.items() if "vramx" in case}
    assert ours == {
        "seconds": "1 1.6",
        "seconds_with_kept_buffers": "0.8 0.8",
        "seconds_in_turn": "2 2",
        "peak_reserved_bytes": "2.14748e+09 2.14748e+09",
        "peak_allocated_bytes": "1.07374e+09 1.07374e+09",
        "ratio_to_in_turn": "0.5 0.8",
        "ratio_to_kept_buffers": "1.25 2",
    }
    assert figures["prefetch vramx", "seconds"] == [1.0, 1.6]
    assert found["prefetch vramx", "seconds"]["median"] == "1.3"


def test_a_crash_is_a_row_that_says_why_and_the_others_are_kept(
    writer: RowWriter, tmp_path: Path
) -> None:
    def start(case: str) -> Together:
        broken = Outcome("failed: killed by SIGSEGV", (line(case, "vramx"),), 1.0)
        return together(
            case, {each.name: good(case, each.name) for each in FAKE[:2]} | {"vramx": broken}
        )

    figures, has_failed = streams.measure(["offload", "prefetch"], start, writer, FAKE)
    assert has_failed
    failed = [row for row in rows(tmp_path) if row["status"] != "ok"]
    assert [row["case"] for row in failed] == ["offload vramx", "prefetch vramx"]
    assert {row["status"] for row in failed} == {"failed: killed by SIGSEGV"}
    assert ("offload native", "seconds") in figures
    assert not any(verdict.is_met for verdict in streams.judge(["offload"], figures))


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        ((1.05, 100.0), [True, True]),  # of the faster one, and of the more frugal one
        ((1.06, 100.0), [False, True]),
        ((0.5, 101.0), [True, False]),
    ],
)
def test_the_better_of_torchs_allocators_is_the_measure_of_each_goal(
    ours: tuple[float, float], met: list[bool]
) -> None:
    figures = figures_of(native=(1.0, 200.0), expandable=(2.0, 100.0), vramx=ours)
    verdicts = streams.judge(["prefetch"], figures)
    assert [found.is_met for found in verdicts] == met
    assert [found.value for found in verdicts] == pytest.approx([ours[0], ours[1] / 100])
    alone = figures_of(native=(1.0, 100.0), vramx=ours)  # the other one has failed
    assert [found.is_met for found in streams.judge(["prefetch"], alone)] == met


def test_only_its_time_has_a_goal_where_the_host_runs_away() -> None:
    verdicts = streams.judge(["runaway", "prefetch"], {})
    judged = [(each.case, each.metric) for each in verdicts]
    assert judged == [
        ("runaway", "seconds"),
        ("prefetch", "seconds"),
        ("prefetch", "peak_reserved_bytes"),
    ]


def test_the_verdicts_are_rows_and_a_line_each(writer: RowWriter, tmp_path: Path) -> None:
    figures = figures_of(native=(1.0, 100.0), vramx=(1.5, 90.0))
    verdicts = streams.judge(["prefetch", "offload"], figures)
    streams.write_verdicts(verdicts, writer)
    written = {row["metric"]: row["median"] for row in rows(tmp_path)}
    ratios = {"seconds_ratio_to_better": "1.5", "peak_reserved_bytes_ratio_to_better": "0.9"}
    assert written == ratios
    lines = lines_of(verdicts)
    assert lines[0] == "MISSED prefetch: seconds 1.5 (<= 1.05 of torch's better)"
    assert lines[1].startswith("ok     prefetch: peak_reserved_bytes 0.9")
    assert lines[2] == "MISSED offload: seconds not measured (<= 1.05 of torch's better)"
    assert lines[-1] == "1 of 4 goals met"


def test_the_table_marks_what_was_missed() -> None:
    figures = figures_of(native=(1.0, 2.0 * GIB), vramx=(1.5, 1.0 * GIB))
    table = streams.table(figures, streams.judge(["prefetch"], figures))
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["prefetch native", "prefetch vramx"]
    assert cells[-1] == ["", "MISSED seconds"]
    assert any("1.00 GiB" in str(column[1]) for column in cells)


def test_a_ring_hands_out_the_buffer_that_came_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from benchmarks.programs import _streams

    waited: list[str] = []
    stream = SimpleNamespace(record_event=lambda: "made", wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(_streams.Fresh, "take", lambda self: object())
    ring = _streams.Kept(2)
    first, second = ring.take(), ring.take()
    ring.give_back(second, SimpleNamespace(record_event=lambda: "second"))
    ring.give_back(first, SimpleNamespace(record_event=lambda: "first"))
    assert [ring.take(), ring.take()] == [second, first]
    assert waited == ["made", "made", "second", "first"]
