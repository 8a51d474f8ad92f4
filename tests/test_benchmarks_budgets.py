"""The benchmark of plans in training loops: its goals, its rivals, and a run on a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks import budgets
from benchmarks.harness import ROOT
from benchmarks.programs._rivals import Known, made, rivals_of

GOOD = {
    ("llama budget 1", "budget_bytes"): [100.0],
    ("llama budget 1", "peak_bytes"): [100.0],
    ("llama budget 1", "of_best_rival"): [1.01],
    ("llama budget 2", "budget_bytes"): [200.0],
    ("llama budget 2", "peak_bytes"): [150.0],
    ("llama budget 2", "of_best_rival"): [0.0],  # none fits
}


def test_good_figures_meet_every_goal() -> None:
    found = budgets.goals(GOOD)
    assert len(found) == 4
    assert all(is_met for *_, is_met in found)
    assert budgets.table(GOOD).row_count == 2


@pytest.mark.parametrize(
    ("metric", "value", "missed"),
    [
        ("peak_bytes", 100.5, "peak_of_budget"),
        ("peak_bytes", float("nan"), "peak_of_budget"),
        ("of_best_rival", 1.02, "of_best_rival"),
        ("of_best_rival", float("nan"), "of_best_rival"),
    ],
)
def test_each_goal_can_be_missed(metric: str, value: float, missed: str) -> None:
    found = budgets.goals({**GOOD, ("llama budget 1", metric): [value]})
    assert [name for _, name, _, is_met in found if not is_met] == [missed]


def test_what_was_not_measured_is_missed() -> None:
    figures = {key: values for key, values in GOOD.items() if key[1] == "budget_bytes"}
    assert [is_met for *_, is_met in budgets.goals(figures)] == [False] * 4


COSTS = {"left": (10, 1.0), "int8": (4, 1.5), "recompute_all": (1, 3.0)}
ALL = [set(COSTS)] * 8


def ask(arrangement: tuple[str, ...]) -> Known | None:
    peak = sum(COSTS[word][0] for word in arrangement)
    return Known(peak, sum(COSTS[word][1] for word in arrangement)) if peak < 70 else None


def test_rivals_are_what_a_user_would_try_and_the_best_of_two_levels_is_among_them() -> None:
    own = ("recompute_all",) * 8
    found = rivals_of(own, ALL, 20, ask)
    assert len(found) == len(set(found))
    assert {(word,) * 8 for word in COSTS} <= set(found)
    assert ("int8", *own[1:]) in found  # one block changed
    fitting = [each for each in found if (known := ask(each)) and known.peak_bytes <= 20]
    best = min(fitting, key=lambda each: ask(each).step_ms)  # type: ignore[union-attr]
    # Of 20, 8 are for recompute_all everywhere: 12 are four times the three more of int8.
    assert best == ("recompute_all",) * 4 + ("int8",) * 4
    assert any("left" in each[1:] and each[0] == "recompute_all" for each in found)


def test_a_block_without_a_word_is_left() -> None:
    words = [{"left", "int8"}, {"left"}, {"recompute_all"}]
    assert made(words, ["int8"] * 3) == ("int8", "left", "recompute_all")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("case", ["llama_lora", "experts", "resnet"])
def test_a_case_trains_as_planned_within_each_budget(case: str) -> None:
    if case == "resnet" and find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    # As conftest.py does for this process: transformers imports torchvision.
    program = (
        "from torchvision_operators import name_missing; name_missing(); "
        f"from benchmarks.programs import _budgets; _budgets.main({case!r})"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PROGRAM_SIZE": "tiny", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    figures = {(line["case"], line["metric"]): line["values"] for line in lines}
    for number in (1, 2):
        name = f"{case} budget {number}"
        # Exact but for scalars of a few bytes, such as an optimizer's counters of steps.
        assert figures[name, "peak_bytes"][0] <= figures[name, "budget_bytes"][0] * 1.001
        assert (name, "of_best_rival") in figures
    if case == "llama_lora":  # of the others a counter more is too much for the rivals as well
        assert figures[f"{case} budget 2", "rivals"][0] > 0
