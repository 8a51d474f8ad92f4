"""Turns on the GPU: processes import ahead of theirs, are alone in it, and block nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from program_stand_ins import FAKE, PROGRAM, ROOT, VRAMX, FakeProcess, Launched, ended_with, outcome

from benchmarks import torch_programs
from benchmarks.harness import RowWriter
from benchmarks.programs import _launch, _turn
from benchmarks.programs._launch import Job, Outcome
from benchmarks.programs._verdicts import Program

# Says in files when it is imported and when it begins; does not end before it is told to.
IN_FILES = """
import pathlib, sys, time
name, folder = sys.argv[1], pathlib.Path({folder!r})
(folder / f"{{name}} imported").touch()
from benchmarks.programs import _turn
_turn.wait()
(folder / f"{{name}} began").touch()
while not (folder / f"{{name}} may end").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., _launch.Started]:
    def started(text: str, *arguments: str, limit_s: float = 60.0) -> _launch.Started:
        path = tmp_path / "program.py"
        path.write_text(text)
        return _launch.Started(Job(path, VRAMX, arguments, limit_s=limit_s))

    return started


def appears(path: Path) -> bool:
    for _ in range(1000):
        if path.exists():
            return True
        time.sleep(0.01)
    return False


def test_a_process_imports_before_its_turn_and_begins_in_it(
    start: Callable[..., _launch.Started], tmp_path: Path
) -> None:
    text = IN_FILES.format(folder=str(tmp_path))
    first, second = start(text, "first"), start(text, "second")
    assert appears(tmp_path / "first imported")
    assert appears(tmp_path / "second imported")
    time.sleep(0.2)  # what does not wait has begun by now: it has nothing else left to do
    assert not (tmp_path / "first began").exists()
    (tmp_path / "first may end").touch()
    first.take_turn()
    assert (tmp_path / "first began").exists()
    assert not (tmp_path / "second began").exists()
    second.cancel()
    assert not (tmp_path / "second began").exists()


def test_the_turn_carries_the_cap_and_its_waiting_is_not_the_programs_time(
    start: Callable[..., _launch.Started],
) -> None:
    says_waited = 'report["waited_s"] = turn.waited_s\nprint(json.dumps(report))\n'
    process = start(PROGRAM + says_waited)
    time.sleep(2.0)
    done = process.take_turn(cap_bytes=7)
    assert done.reports[-1]["extra"] == {"cap": 7}
    waited_s = done.reports[-1]["waited_s"]
    # An interpreter without torch starts in far less than the two seconds that it had.
    assert 1.0 < waited_s <= 2.5
    assert 0 < done.wall_s < 2.0


def test_a_program_that_died_before_its_turn_says_why_and_blocks_nobody(
    start: Callable[..., _launch.Started],
) -> None:
    dead = start("raise ImportError('no such module')")
    time.sleep(0.5)
    assert dead.take_turn().status == "failed: ImportError: no such module"
    assert start(PROGRAM).take_turn().status == "ok"


@pytest.mark.slow
def test_a_program_that_never_asks_for_its_turn_ends_with_its_time(
    start: Callable[..., _launch.Started],
) -> None:
    hangs = start("import time; time.sleep(600)", limit_s=1.0)
    time.sleep(1.5)  # nobody has waited for it yet
    began_s = time.monotonic()
    assert hangs.take_turn().status == "failed: no result after 1 s"
    assert 1.0 <= time.monotonic() - began_s < 30.0


def test_a_program_ends_without_beginning_when_the_harness_is_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, _turn.TURN: str(write), "PYTHONPATH": str(ROOT)}
    command = "from benchmarks.programs import _turn; _turn.wait(); print('began')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=[write],
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is gone" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_run_by_hand_begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_turn.TURN, raising=False)
    monkeypatch.delenv("PROGRAM_CAP_BYTES", raising=False)
    assert _turn.wait() == _turn.Turn(None, 0.0)
    monkeypatch.setenv("PROGRAM_CAP_BYTES", "5")
    assert _turn.wait().cap_bytes == 5
    monkeypatch.delenv(_turn.STEPS, raising=False)
    assert _turn.wait_for_step() == 0.0


class Started:
    """Starts processes that end as a function says, and keeps them."""

    def __init__(self, writer: RowWriter, repeats: int, ended: Callable[[Launched], Outcome]):
        self.processes: list[FakeProcess] = []
        self._ended = ended
        self.lane = torch_programs.Lane(repeats, 60.0, writer, FAKE, self._launch)

    def _launch(self, job: Job) -> FakeProcess:
        self.processes.append(FakeProcess(job, self._ended))
        return self.processes[-1]

    @property
    def cancelled(self) -> list[str]:
        return [each.job.script.stem for each in self.processes if each.was_cancelled]


def test_no_program_imports_while_another_has_its_turn(writer: RowWriter) -> None:
    turns: list[tuple[str, int]] = []

    def ended(launched: Launched) -> Outcome:
        assert all(process.is_ready for process in started.processes)
        turns.append((launched.job.script.stem, len(started.processes)))
        return outcome(launched.job.allocator.name)

    started = Started(writer, 1, ended)
    programs = [Program(name) for name in "abc"]
    runs = torch_programs.spread(programs, ["0"], started.lane)
    names = [process.job.script.stem for process in started.processes]
    assert names == ["a"] * 7 + ["b"] * 7 + ["c"] * 7
    # Two programs, of seven processes each, import at once.
    assert turns == [("a", 14)] * 7 + [("b", 14)] * 7 + [("c", 21)] * 7
    assert len(runs) == 21


def test_processes_of_cases_are_started_some_at_a_time() -> None:
    started: list[FakeProcess] = []

    def start(item: int) -> FakeProcess:
        started.append(ended_with())
        return started[-1]

    seen = []
    for item, process in _launch.in_batches(range(8), start, threading.Event(), 3):
        assert process is started[item]
        assert all(found.is_ready for found in started)
        seen.append(len(started))
    assert seen == [3, 3, 3, 6, 6, 6, 8, 8]


def test_one_that_cannot_be_started_ends_those_that_were() -> None:
    started: list[FakeProcess] = []

    def start(item: int) -> FakeProcess:
        if item == 2:
            raise OSError("no more processes")
        started.append(ended_with())
        return started[-1]

    with pytest.raises(OSError, match="no more processes"):
        next(_launch.in_batches(range(8), start, threading.Event(), 3))
    assert [process.was_cancelled for process in started] == [True, True]


def test_the_rest_of_a_program_that_does_not_run_is_cancelled(writer: RowWriter) -> None:
    def ended(launched: Launched) -> Outcome:
        works = launched.job.script.stem == "good"
        return outcome(launched.job.allocator.name) if works else outcome(status="failed: x")

    started = Started(writer, 2, ended)
    runs = torch_programs.spread([Program("bad"), Program("good")], ["0"], started.lane)
    assert [run.program.name for run in runs] == ["bad"] * 3 + ["good"] * 10
    assert started.cancelled == ["bad"] * 7


def test_stopping_cancels_what_waits(writer: RowWriter) -> None:
    def ended(launched: Launched) -> Outcome:
        started.lane.stop.set()
        return outcome(status="failed: stopped")

    started = Started(writer, 2, ended)
    assert len(list(started.lane.runs([Program("a"), Program("b")], "0"))) == 3
    assert [each.was_cancelled for each in started.processes] == [False] * 3 + [True] * 10
    assert writer.count == 0


# Says in a file which program takes a step, hangs in its second one if it is d, fails if it is b.
STEPPING = """
import pathlib, sys, time
from benchmarks.programs import _turn
name, steps, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path({folder!r})
_turn.wait()
for step in range(steps):
    _turn.wait_for_step()
    with (folder / "steps").open("a") as file:
        file.write(name)
    if name == "d" and step == 1:
        time.sleep(600)
sys.exit("it fails" if name == "b" else 0)
"""


def stepping(folder: Path, steps: dict[str, int]) -> list[Outcome]:
    path = folder / "program.py"
    path.write_text(STEPPING.format(folder=str(folder)))
    jobs = [
        Job(path, VRAMX, (name, str(n)), limit_s=2.0, has_steps=True) for name, n in steps.items()
    ]
    together = _launch.Together([_launch.Started(job) for job in jobs])
    return together.take_turns([None] * len(jobs), threading.Event())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "taken", "status"),
    [
        ({"a": 3, "b": 3, "c": 3}, "abcbcacab", "failed: it fails"),
        ({"a": 3, "b": 1, "c": 3}, "abccaac", "failed: it fails"),  # it ends early
        ({"a": 3, "d": 3, "c": 3}, "adcdcaac", "failed: no result after 2 s"),  # it hangs
    ],
)
def test_programs_take_their_steps_in_turn_and_one_that_ends_leaves_the_others_theirs(
    tmp_path: Path, steps: dict[str, int], taken: str, status: str
) -> None:
    done = stepping(tmp_path, steps)
    assert (tmp_path / "steps").read_text() == taken
    # Of what ended while others went on is told how it ended.
    silent = "failed: the program printed no report"
    assert [found.status for found in done] == [silent, status, silent]


@pytest.mark.slow
def test_waiting_for_others_counts_as_nobodys_time(tmp_path: Path) -> None:
    text = (
        "import json, os, time\n"
        "from benchmarks.programs import _turn\n"
        "waited_s = _turn.wait().waited_s + _turn.wait_for_step()\n"
        "time.sleep(1.0)\n"
        "print(json.dumps(dict(allocator=os.environ['FAKE_ALLOCATOR'], waited_s=waited_s)))\n"
    )
    (tmp_path / "program.py").write_text(text)
    # Three of these would not end within two seconds of the first one's beginning.
    jobs = [Job(tmp_path / "program.py", VRAMX, limit_s=2.0, has_steps=True) for _ in range(3)]
    together = _launch.Together([_launch.Started(job) for job in jobs])
    done = together.take_turns([None] * 3, threading.Event())
    assert [found.status for found in done] == ["ok"] * 3
    assert all(1.0 <= found.wall_s < 2.0 for found in done)
