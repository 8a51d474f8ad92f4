"""The benchmark of plans: how steps of several budgets are compared, and what it measures."""

from __future__ import annotations

import pytest
from program_stand_ins import figures_of, run_tiny
from test_benchmarks_goals import GOOD as ALL_GOOD

from benchmarks import plan

GOOD = ALL_GOOD["plan"]


@pytest.mark.parametrize("case", ["llama budget 1", "llama budget 2"])
def test_a_plan_that_was_not_timed_misses_its_goal(case: str) -> None:
    figures = {key: values for key, values in GOOD.items() if key != (case, "step_ms")}
    missed = [(name, metric) for name, metric, _, is_met in plan.goals(figures) if not is_met]
    assert missed == [(case, "step_of_smaller_budget")]
    assert plan.table(figures).row_count == 2


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
