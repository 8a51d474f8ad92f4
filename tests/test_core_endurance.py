"""The core under random steps, each checked against a shadow; `make stress` takes ten million.

Without sanitizers, with the objects that users run.
"""

from __future__ import annotations

import re

import native_build
import pytest
from test_native import run_program

STEPS = 200_000
# Forks are done under the sanitizers (test_native.py).
PARTS = ("random", "repeats", "defects", "failures", "threads")


@pytest.mark.slow
def test_the_core_holds_for_many_random_steps() -> None:
    stress = next(p for p in native_build.programs() if p.name == "core_stress")
    printed = run_program(native_build.build(stress, "plain"), str(STEPS), "1", *PARTS)
    steps = re.search(r"^operations (\d+)$", printed, re.MULTILINE)
    assert steps is not None
    assert int(steps[1]) >= STEPS
