"""The benchmarks of plans and of budgets: what is compared, rivals, and runs on a processor."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from program_stand_ins import figures_of, run_tiny
from test_benchmarks_goals import GOOD as ALL_GOOD

from benchmarks import plan
from benchmarks.programs._rivals import Known, made, rivals_of

GOOD = ALL_GOOD["plan"]


def test_a_plan_is_compared_with_every_smaller_budgets() -> None:
    """Not with the last one's only, than which it may be faster and yet slower than the first's."""
    later = {("llama budget 3", metric): values for (_, metric), values in list(GOOD.items())[4:]}
    slow = {("llama budget 2", "step_ms"): [22.0, 33.0, 23.0]}
    later["llama budget 3", "step_ms"] = [21.0, 31.5, 22.0]
    found = plan.goals({**GOOD, **slow, **later})
    missed = [(name, metric) for name, metric, _, is_met in found if not is_met]
    assert missed == [(f"llama budget {n}", "step_of_smaller_budget") for n in (2, 3)]


def test_a_case_plans_five_budgets_and_runs_them() -> None:
    pytest.importorskip("transformers")
    lines = run_tiny("from benchmarks.programs import _plan; _plan.main('llama')")
    goals = plan.goals(figures_of(*lines))
    verdicts = [found for found in goals if found[1] != "step_of_smaller_budget"]
    assert len(verdicts) == 10
    assert all(is_met for *_, is_met in verdicts)


# --- plans in training loops ----------------------------------------------------------------------


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
    program = f"from benchmarks.programs import _budgets; _budgets.main({case!r})"
    figures = figures_of(*run_tiny(program))
    for number in (1, 2):
        name = f"{case} budget {number}"
        # Exact but for scalars of a few bytes, such as an optimizer's counters of steps.
        assert figures[name, "peak_bytes"][0] <= figures[name, "budget_bytes"][0] * 1.001
        assert (name, "of_best_rival") in figures
    if case == "llama_lora":  # of the others a counter more is too much for the rivals as well
        assert figures[f"{case} budget 2", "rivals"][0] > 0
