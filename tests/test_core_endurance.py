"""The core under random steps, each checked against a shadow; `make stress` takes ten million.

Without sanitizers, with the objects that users run.
"""

from __future__ import annotations

import re

import native_build
import pytest
from test_native import run_program

# Forks, and a few of the random steps, are done under the sanitizers (test_native.py).
STEPS = 1_000_000
RANDOM = ("random", "repeats", "threads")
CHECKS = ("defects", "failures")  # they have steps of their own


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
