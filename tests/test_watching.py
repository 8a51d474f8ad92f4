"""What is watched once CUDA is initialised: failures, history, peaks, under any allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from failing_program import GIB, Program, cuda, shim
from fake_cuda import FakeCuda, fail_to_build, fail_with

import vramx
from vramx import _autoload, config
from vramx.allocator import oom_snapshot, peaks
from vramx.errors import ShimError, VramxWarning

__all__ = ["cuda", "shim"]


@pytest.fixture(autouse=True)
def _asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have VRAMX=1 be set, which a program that installs by itself has no use for."""
    monkeypatch.setattr(config, "is_enabled", lambda: True)


def test_without_a_folder_of_its_own_it_goes_to_the_cache(cuda: FakeCuda, tmp_path: Path) -> None:
    program = Program(cuda, tmp_path / "cache" / "oom")
    cuda.configure(oom_dir=None)
    program.start()
    assert program.fail(GIB).endswith(str(program.files[0]))
    assert oom_snapshot.newest(cuda.settings) == program.files[0]


def test_it_can_be_switched_off(cuda: FakeCuda, tmp_path: Path) -> None:
    program = Program(cuda, tmp_path / "oom")
    cuda.configure(oom_snapshot=False)
    program.start()
    assert not cuda.observers
    assert program.fail(GIB) == ""


def test_torchs_own_allocator_is_watched_where_it_stays(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(cuda, tmp_path / "oom")
    cuda.configure(enabled=True, record=True)
    monkeypatch.setattr(config, "is_enabled", lambda: True)
    fail_to_build(monkeypatch, ShimError("no compiler"))
    _autoload._autoload()
    with pytest.warns(VramxWarning, match="not installed"):
        cuda.initialise()
    assert program.fail(GIB).endswith(str(program.files[0]))
    assert len(cuda.observers) == len(cuda.histories) == 1


def test_a_torch_without_observers_goes_on(cuda: FakeCuda, tmp_path: Path) -> None:
    program = Program(cuda, tmp_path / "oom")
    refuse = "_cuda_attach_out_of_memory_observer"
    cuda.patch.setattr(torch._C, refuse, lambda _: fail_with(RuntimeError("not supported")))
    program.start()
    assert vramx.allocator_installed()
    assert program.fail(GIB) == ""


def test_recording_starts_torchs_history_once_and_leaves_the_programs_own(cuda: FakeCuda) -> None:
    vramx.install_allocator(record=True)
    assert not cuda.histories  # starting it would initialise CUDA
    cuda.initialise()
    assert [each["max_entries"] for each in cuda.histories] == [65_536]


def test_late_installation_is_watched_at_once(cuda: FakeCuda, tmp_path: Path) -> None:
    program = Program(cuda, tmp_path / "oom")
    cuda.initialise()
    vramx.install_allocator(late=True)
    assert program.fail(GIB).endswith(".pickle")
    vramx.install_allocator(late=True)
    assert len(cuda.observers) == 1


def test_what_was_held_at_most_is_written_at_exit_also_where_counters_are_set_back(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    at_exit: list[Any] = []
    held = {0: 5 * GIB, 1: 0}
    cuda.patch.setattr(peaks.atexit, "register", at_exit.append)
    cuda.patch.setattr(torch.cuda, "max_memory_reserved", lambda device: held[device])
    set_back = "_cuda_resetPeakMemoryStats"
    cuda.patch.setattr(torch._C, set_back, lambda device: held.update({device: 0}), raising=False)
    cuda.configure(enabled=True, allocator="torch", peaks_dir=tmp_path, oom_snapshot=False)
    _autoload._autoload()
    cuda.initialise()
    assert not vramx.allocator_installed()
    torch._C._cuda_resetPeakMemoryStats(0)
    held[1] = GIB
    for action in at_exit:
        action()
    assert peaks.read(tmp_path) == peaks.Held(5 * GIB, frozenset({"torch"}))


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_that_tells_nothing_is_watched_for_the_rest(
    cuda: FakeCuda, tmp_path: Path, backend: str
) -> None:
    at_exit: list[Any] = []
    cuda.patch.setattr(peaks.atexit, "register", at_exit.append)
    cuda.backend = backend
    cuda.configure(enabled=True, allocator="torch", record=True, peaks_dir=tmp_path, limit="20GiB")
    _autoload._autoload()
    cuda.initialise()
    for action in at_exit:
        action()
    assert cuda.observers == cuda.histories == []
    assert len(cuda.fractions) == 2
    assert peaks.read(tmp_path).allocators == {"torch"}


def test_the_limit_holds_for_torchs_own_allocator(cuda: FakeCuda) -> None:
    cuda.current = 0
    cuda.configure(enabled=True, allocator="torch", limit="20GiB", oom_snapshot=False)
    _autoload._autoload()
    cuda.initialise()
    assert sorted(cuda.fractions) == [(0.25, 0), (0.25, 1)]
    assert cuda.current == 0
