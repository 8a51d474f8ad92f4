"""The C++ test programs, as users have the core and under sanitizers.

The steps are checked against a shadow, with the objects that users run; `make stress` takes ten
million.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import native_build
import pytest
from native_build import SANITIZERS, Program, programs

RUN_LIMIT_S = 240
# The first report ends the program, with a code that the programs themselves do not use. What was
# freed waits in 32 MiB for a use of it, not in 256: each fork of the stress copies its page tables.
# Of the calls that led to an allocation eight are remembered, not 30: a tenth of the time. An
# illegal instruction is where undefined behaviour was found, and its line is told.
OPTIONS = {
    "ASAN_OPTIONS": "exitcode=99:detect_leaks=1:quarantine_size_mb=32:malloc_context_size=8"
    ":handle_sigill=1",
    "TSAN_OPTIONS": "exitcode=99:halt_on_error=1",
}
# What a program is told on the command line; most need nothing. The stress counts its steps: under
# a sanitizer each takes several times as long. There it leaves out the defects that it plants to
# check its own checks, and the failure at every driver call, both of which are tested without a
# sanitizer below; and where races are looked for, what runs in one thread, or in two that wait for
# each other.
PARTS = ["regressions", "random", "repeats", "threads", "forks"]
ARGUMENTS = {
    ("driver_contract", "plain"): ["sim"],
    ("core_stress", "plain"): ["20000", "1", *PARTS],
    ("driver_contract", "asan"): ["sim"],
    ("driver_contract", "tsan"): ["sim"],
    ("core_stress", "asan"): ["20000", "1", *PARTS],
    ("core_stress", "tsan"): ["200000", "1", "threads", "forks"],
}


def run_program(executable: Path, *arguments: str) -> str:
    """Run a test program, expect that it passes, and return what it printed."""
    done = subprocess.run(
        [executable, *arguments],
        env={**os.environ, **OPTIONS},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.strip(), "a program that says nothing has checked nothing"
    return done.stdout


# The units' only threads meet at the lock, as the stress's do; they would take half a minute.
LEFT_OUT = ("core_units", "tsan")
# Compiling everything with their checks takes a minute for each.
LONG = {"plain": [], "asan": [pytest.mark.slow], "tsan": [pytest.mark.slow]}


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        pytest.param(program, kind, id=f"{program.name}-{kind}", marks=LONG[kind])
        for program in programs()
        for kind in native_build.BUILDS
        if (program.name, kind) != LEFT_OUT
    ],
)
def test_program_passes(program: Program, kind: str) -> None:
    if kind in SANITIZERS and not native_build.sanitizer_runs(kind):
        pytest.skip(f"g++ has no runtime for -fsanitize={SANITIZERS[kind]} here")
    executable = native_build.build(program, kind)
    run_program(executable, *ARGUMENTS.get((program.name, kind), []))


@pytest.mark.gpu
def test_driver_contract_holds_on_the_gpu() -> None:
    # Under no thread sanitizer: libcuda is not instrumented and would be reported.
    if not native_build.sanitizer_runs("asan"):
        pytest.skip("g++ has no runtime for -fsanitize=address here")
    contract = next(program for program in programs() if program.name == "driver_contract")
    executable = native_build.build(contract, "asan")
    # libcuda maps fixed addresses that the shadow's gap would refuse, and frees nothing at exit.
    options = {"ASAN_OPTIONS": "protect_shadow_gap=0:detect_leaks=0:exitcode=99"}
    done = subprocess.run(
        [executable, "cuda"],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "body"),
    [
        ("asan", "int* p = new int[2]; p[argc + 1] = 1; delete[] p; return 0;"),
        ("asan", "int n = 2147483647; n += argc; return n == 0;"),
        ("tsan", "int n = 0; std::thread t([&] { ++n; }); ++n; t.join(); return 0;"),
    ],
    ids=["out-of-bounds write", "signed overflow", "data race"],
)
def test_a_planted_defect_is_reported(tmp_path, sanitizer: str, body: str) -> None:
    if not native_build.sanitizer_runs(sanitizer):
        pytest.skip(f"g++ has no runtime for -fsanitize={SANITIZERS[sanitizer]} here")
    checks = native_build.BUILDS[sanitizer].split()
    source = f"#include <thread>\nint main(int argc, char**) {{ (void)argc; {body} }}\n"
    program = tmp_path / "defect"
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-pthread",
        *checks,
        "-x",
        "c++",
        "-",
        "-o",
        str(program),
    ]
    subprocess.run(command, input=source, text=True, check=True)
    done = subprocess.run(
        [program], env={**os.environ, **OPTIONS}, capture_output=True, check=False
    )
    assert done.returncode != 0


# --- random steps ---------------------------------------------------------------------------------


# Forks, and a few of the random steps, are done above.
STEPS = 1_000_000
RANDOM = ("random", "repeats", "threads")
# They have steps of their own. The defects check the checks: shrinking each is a process a try.
CHECKS = (pytest.param("defects", marks=pytest.mark.slow), "failures")


def stress(*arguments: object) -> str:
    program = next(p for p in native_build.programs() if p.name == "core_stress")
    return run_program(native_build.build(program, "plain"), *map(str, arguments))


@pytest.mark.parametrize("check", CHECKS)
def test_planted_defects_are_found_and_a_failed_call_changes_nothing(check: str) -> None:
    stress(1, 1, check)


@pytest.mark.slow
def test_the_core_holds_for_many_random_steps() -> None:
    steps = re.search(r"^operations (\d+)$", stress(STEPS, 1, *RANDOM), re.MULTILINE)
    assert steps is not None
    assert int(steps[1]) >= STEPS
