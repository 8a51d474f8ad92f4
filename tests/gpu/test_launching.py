"""The ways to start a program under vramx, and what it says where it is too late."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from gpu import runner
from gpu.runner import CHECKOUT, HERE, PROGRAMS, Outcome, importable, script

pytestmark = [pytest.mark.gpu, pytest.mark.vramx_only]

VRAMX_RUN = [sys.executable, "-m", "vramx", "run"]
USER = str(PROGRAMS / "plain_user.py")
EXIT_CODE = 7

Outcomes = dict[str, Future[Outcome]]


def torchrun() -> list[str]:
    """Return the launcher: the command, or its module where Python's scripts are on no path."""
    beside = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if beside is None:
        return [sys.executable, "-m", "torch.distributed.run"]
    return [beside]


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launching") / "statistics.json"


@pytest.fixture(scope="module")
def outcomes(allocator: str, statistics: Path) -> Iterator[Outcomes]:
    """Start them all at once; the shim they need was compiled when this session installed it."""
    plain = runner.environment({})
    with_tests = runner.environment({"PYTHONPATH": f"{HERE.parent}:{CHECKOUT}"})
    by_variable = runner.environment({"VRAMX": "1"}, path=importable())
    asynchronous = {
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "VRAMX_ALLOCATOR": "torch",
        "VRAMX_LIMIT": "0.5",
        "VRAMX_PEAKS": str(statistics.parent),
        "VRAMX_RECORD": "1",
    }
    workers = [*torchrun(), "--standalone", "--nproc-per-node", "1"]
    to_exit = ["--exit", str(EXIT_CODE)]
    commands = {
        "native": ([sys.executable, USER], plain),
        "script": ([*VRAMX_RUN, "--stats", str(statistics), USER, *to_exit, "a", "b c"], plain),
        "module": ([*VRAMX_RUN, "-m", "gpu.programs.plain_user"], with_tests),
        "torchrun": ([*VRAMX_RUN, "--", *workers, USER], plain),
        "variable": (script("spawning_user"), by_variable),
        "late": (script("late_install"), plain),
        "asynchronous": (script("plain_user"), {**by_variable, **asynchronous}),
    }
    with runner.started(commands) as running:
        yield running


@pytest.fixture
def native_loss(outcomes: Outcomes) -> str:
    facts = outcomes["native"].result().facts()
    assert facts["backend"] == "native"
    return str(facts["loss"])


# --- vramx run ------------------------------------------------------------------------------------


def test_a_script_runs_under_vramx_with_its_arguments_and_exit_code(
    outcomes: Outcomes, native_loss: str
) -> None:
    facts = outcomes["script"].result().facts(code=EXIT_CODE)
    assert facts["backend"] == "vramx"
    assert facts["words"] == ["a", "b c"]
    assert facts["loss"] == native_loss


def test_the_program_starts_with_cuda_untouched(outcomes: Outcomes) -> None:
    facts = outcomes["script"].result().facts(code=EXIT_CODE)
    assert facts["initialised_early"] is False
    assert (facts["early_statistics"], facts["early_bytes"]) == ({}, 0)


def test_its_statistics_are_written_at_exit(outcomes: Outcomes, statistics: Path) -> None:
    outcomes["script"].result().facts(code=EXIT_CODE)
    (device,) = json.loads(statistics.read_text())["devices"]
    assert device["allocated_peak_bytes"] > 0
    assert device["reserved_peak_bytes"] >= device["allocated_peak_bytes"]


def test_a_module_runs_under_vramx(outcomes: Outcomes, native_loss: str) -> None:
    facts = outcomes["module"].result().facts()
    assert (facts["backend"], facts["loss"]) == ("vramx", native_loss)


def test_the_workers_of_torchrun_run_under_vramx(outcomes: Outcomes, native_loss: str) -> None:
    facts = outcomes["torchrun"].result().facts()
    assert (facts["backend"], facts["rank"], facts["loss"]) == ("vramx", "0", native_loss)


# --- VRAMX=1 alone --------------------------------------------------------------------------------


def test_the_variable_alone_installs_it(outcomes: Outcomes) -> None:
    facts = outcomes["variable"].result().facts()
    assert (facts["backend"], facts["total"]) == ("vramx", 1000)


def test_an_allocator_that_keeps_nothing_of_what_is_asked_serves_on(outcomes: Outcomes) -> None:
    ended = outcomes["asynchronous"].result()
    assert ended.facts()["backend"] == "cudaMallocAsync"
    assert "Traceback" not in ended.stderr


def test_spawned_children_have_it_too(outcomes: Outcomes) -> None:
    facts = outcomes["variable"].result().facts()
    assert (facts["childs_backend"], facts["childs_total"]) == ("vramx", 1000)
    assert facts["childs_exit_code"] == 0


# --- too late -------------------------------------------------------------------------------------


def test_a_late_installation_is_refused_and_names_the_line(outcomes: Outcomes) -> None:
    facts = outcomes["late"].result().facts()
    path = PROGRAMS / "late_install.py"
    lines = path.read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if "initialises CUDA" in text]
    assert f"{path}:{line}" in facts["refusal"]
    assert "late=True" in facts["refusal"]
    assert facts["installed_after_refusal"] is False
    assert facts["backend_after_refusal"] == "native"


def test_a_late_installation_that_is_meant_works(outcomes: Outcomes) -> None:
    facts = outcomes["late"].result().facts()
    assert facts["backend"] == "vramx"
    assert facts["new_is_the_cores"]
    assert facts["both_are_counted"]
    assert facts["gradient_is_finite"]


def test_tensors_from_before_a_late_installation_stay_valid(outcomes: Outcomes) -> None:
    facts = outcomes["late"].result().facts()
    assert facts["old_is_counted"]
    assert facts["sum"] == 7 << 20
    assert facts["doubled"] == 6 << 20
    assert facts["allocated_at_the_end"] == 0
    assert facts["accelerator_agrees"]
