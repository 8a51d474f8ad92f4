"""A program's process: what it reports, how it fails, what it inherits, and that it always ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from program_stand_ins import (
    EXPANDABLE,
    FAKE,
    GOOD_REPORT,
    NATIVE,
    PROGRAM,
    ROOT,
    VRAMX,
    machine_with,
)

from benchmarks.harness import UnavailableError
from benchmarks.programs import _launch
from benchmarks.programs._launch import OUT_OF_MEMORY, Job, in_turn
from vramx.errors import InvalidValueError


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


def test_the_report_is_found_among_other_output(script: Callable[[str], Path]) -> None:
    done = _launch.run(Job(script("print('{broken')\n" + PROGRAM), VRAMX))
    assert done.status == "ok"
    assert done.reports[-1]["losses"] == GOOD_REPORT["losses"]
    assert 0 < done.wall_s < 30


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise ValueError('see ' + __file__)", "failed: ValueError: see program.py"),
        ("raise RuntimeError('CUDA out of memory. Tried 2 GiB')", OUT_OF_MEMORY),
        ("import os; os.abort()", "failed: killed by SIGABRT"),
        ("import os; os._exit(3)", "failed: exit code 3"),
        ("print('nothing')", "failed: the program printed no report"),
        (
            PROGRAM.replace("os.environ[", "'x' or os.environ["),
            "failed: the allocator was x, not vramx",
        ),
        (
            "import sys; print('vramx: no compiler', file=sys.stderr)\n"
            + PROGRAM.replace("os.environ[", "'x' or os.environ["),
            "failed: the allocator was x, not vramx: vramx: no compiler",
        ),
    ],
)
def test_a_program_that_fails_says_why(
    script: Callable[[str], Path], text: str, status: str
) -> None:
    assert _launch.run(Job(script(text), VRAMX)).status == status


@pytest.mark.slow
def test_a_program_that_hangs_ends_with_its_children(
    script: Callable[[str], Path], tmp_path: Path
) -> None:
    hanging = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    done = _launch.run(Job(script(hanging), VRAMX, limit_s=2.0))
    assert done.status == "failed: no result after 2 s"
    pid = int((tmp_path / "pid").read_text())
    assert has_ended(pid)


def has_ended(pid: int) -> bool:
    """Say whether a killed process is gone, or waits for nothing but its parent to notice."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_stopping_ends_a_program_early(script: Callable[[str], Path]) -> None:
    stop = threading.Event()
    stop.set()
    done = _launch.run(Job(script("import time; time.sleep(600)"), VRAMX, limit_s=60.0), stop)
    assert done.status.startswith("failed")
    assert done.wall_s < 30


def test_a_job_sets_the_gpu_and_inherits_no_allocator() -> None:
    inherited = {
        "VRAMX": "1",
        "VRAMX_LIMIT": "1GiB",
        "VRAMX_CACHE_DIR": "cache",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "PYTHONPATH": "mine",
        "HOME": "home",
    }
    job = Job(Path("p.py"), NATIVE, gpu="3")
    found = _launch.environment(job, inherited)
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert found["PYTHONPATH"] == f"{ROOT}{os.pathsep}mine"
    assert (found["HOME"], found["VRAMX_CACHE_DIR"]) == ("home", "cache")
    for absent in ("VRAMX", "VRAMX_LIMIT", "PYTORCH_CUDA_ALLOC_CONF"):
        assert absent not in found
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # or cuBLAS need not repeat
    assert "CUDA_VISIBLE_DEVICES" not in _launch.environment(Job(Path("p.py"), NATIVE), inherited)


def test_a_quick_job_takes_fewer_steps_unless_the_environment_names_a_size() -> None:
    job = Job(Path("p.py"), NATIVE, is_quick=True)
    assert _launch.environment(job, {})["PROGRAM_SIZE"] == "quick"
    assert _launch.environment(job, {"PROGRAM_SIZE": "tiny"})["PROGRAM_SIZE"] == "tiny"
    assert "PROGRAM_SIZE" not in _launch.environment(Job(Path("p.py"), NATIVE), {})


@pytest.mark.parametrize(
    ("size", "values"), [("full", (1, 1)), ("tiny", (2, 2)), ("quick", (1, 3)), (None, (1, 1))]
)
def test_a_size_has_values_of_its_own(
    size: str | None, values: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("PROGRAM_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("PROGRAM_SIZE", size)
    from benchmarks.programs._report import sized

    assert (sized(1, 2), sized(1, 2, quick=3)) == values


def test_the_three_allocators_differ_by_command_and_environment_only() -> None:
    native, expandable, vramx = _launch.ALLOCATORS
    assert (native.prefix, native.environment) == ((), ())
    assert expandable.prefix == ()
    assert dict(expandable.environment)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert (vramx.prefix, vramx.environment) == (("-m", "vramx", "run"), ())


def test_every_other_round_goes_backwards_and_so_do_ways_of_one_process() -> None:
    assert in_turn(FAKE, 0) == [NATIVE, EXPANDABLE, VRAMX]
    assert in_turn(FAKE, 1) == [VRAMX, EXPANDABLE, NATIVE]
    pytest.importorskip("torch")
    from benchmarks.programs import _report

    assert "".join(_report.in_turn("abc", 3)) == "abccbaabc"


def test_gpus_are_chosen_among_the_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "load_core", machine_with(4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _launch.visible_gpus(0, 4) == ["0", "1", "2", "3"]
    assert _launch.visible_gpus(1, 2) == ["1", "2"]
    with pytest.raises(InvalidValueError, match="accepted are 0 to 3"):
        _launch.visible_gpus(1, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5")
    monkeypatch.setattr(_launch, "load_core", machine_with(2))
    assert _launch.visible_gpus(0, 2) == ["7", "GPU-5"]
    monkeypatch.setattr(_launch, "load_core", machine_with(0))
    with pytest.raises(UnavailableError, match="needs a GPU"):
        _launch.visible_gpus(0, 1)


def test_a_step_before_the_turn_is_refused() -> None:
    pytest.importorskip("torch")
    from benchmarks.programs._report import Recorder

    recorder = Recorder(deterministic=False)
    with pytest.raises(RuntimeError, match="before begin"), recorder.step():
        pass


def test_programs_take_their_turn_before_they_touch_the_gpu() -> None:
    """A device of the GPU comes from `begin()` alone, and every program calls it."""
    for path in _launch.PROGRAMS.glob("[a-z]*.py"):
        text = path.read_text()
        assert "recorder.begin()" in text or "llama(recorder" in text, path.name
        for early in ('device("cuda', '="cuda', ".cuda()", "cuda.is_available"):
            assert early not in text, path.name
