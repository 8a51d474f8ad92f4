"""Long work shows a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from plan_tools import counted_time

from vramx import progress
from vramx.allocator import shim_build
from vramx.progress import ProgressBar

__all__ = ["counted_time"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


def terminal_of(patch: pytest.MonkeyPatch, delay_s: float = 1.0) -> Terminal:
    """Put stderr on a terminal. In the test, because pytest sets it back after its fixtures."""
    shown = Terminal()
    patch.setattr("sys.stderr", shown)
    patch.setattr(progress.ProgressBar.__init__, "__defaults__", (delay_s,))
    return shown


def test_a_bar_says_what_is_done_and_goes(patch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(patch, delay_s=0)
    with ProgressBar() as bar:
        bar.show("measuring", 1, 4)
        assert "measuring" in terminal.getvalue()
        assert "25%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is wiped


def test_short_work_shows_none(patch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(patch)
    with ProgressBar() as bar:
        bar.show("measuring", 1, 4)
    assert terminal.getvalue() == ""


def test_nothing_is_drawn_between_reports(patch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(patch, delay_s=0)
    now_s = [100.0]
    patch.setattr(progress.time, "monotonic", lambda: now_s[0])
    with ProgressBar() as bar:
        bar.show("first", 1, 4)
        drawn = terminal.getvalue()
        bar.show("second", 2, 4)  # too soon after
        assert terminal.getvalue() == drawn
        now_s[0] += 0.2
        bar.show("third", 3, 4)
    assert "second" not in terminal.getvalue()
    assert "third" in terminal.getvalue()


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO(), None])
def test_a_file_and_the_other_ranks_get_none(
    patch: pytest.MonkeyPatch, stderr: io.StringIO | None
) -> None:
    terminal_of(patch, delay_s=0)
    patch.setattr("sys.stderr", stderr)
    if isinstance(stderr, Terminal):
        patch.setenv("RANK", "1")
    with ProgressBar() as bar:
        bar.show("measuring", 1, 4)
    assert stderr is None or stderr.getvalue() == ""


def test_the_first_compilation_shows_how_far_it_is(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = terminal_of(patch)
    done = subprocess.CompletedProcess([], 0, "")
    patch.setattr(shim_build.subprocess, "run", lambda *_, **__: done)
    shim_build._run_all([["one"], ["two"]], tmp_path / "log")
    assert "compiling the allocator for this torch, once" in terminal.getvalue()


@pytest.mark.usefixtures("core")
def test_a_replay_shows_its_policies(run: Any, traces: Path, patch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(patch, delay_s=0)
    assert run("replay", traces / "offload_streams.npz")[0] == 0
    assert "offload_streams.npz live" in terminal.getvalue()
