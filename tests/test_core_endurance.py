"""The core under a million random steps, each checked against a shadow of it or byte by byte."""

from __future__ import annotations

import re

import native_build
import pytest
from test_native import run_program

STEPS = 1_000_000
# Not the failures: one program, without a seed, that runs under the address sanitizer as it is.
PARTS = ("regressions", "random", "repeats", "defects", "threads", "forks")


@pytest.mark.slow
def test_the_core_holds_for_a_million_random_steps() -> None:
    stress = next(p for p in native_build.programs() if p.name == "core_stress")
    # Half are drawn one by one; programs that repeat themselves, and threads, take the others.
    printed = run_program(native_build.build(stress, "plain"), str(STEPS // 2), "1", *PARTS)
    steps = re.search(r"^(\d+) operations of all parts$", printed, re.MULTILINE)
    assert steps is not None
    assert int(steps[1]) >= STEPS
