"""The benchmark that leaves out one placement rule of the core after the other."""

from __future__ import annotations

import pytest

from benchmarks import ablations
from benchmarks.ablations import AS_IT_IS, RULES, Edit
from benchmarks.harness import Options


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_left_out_by_one_edit_of_the_source(rule: str) -> None:
    edit = RULES[rule]
    text = ablations.text_without(rule)
    assert edit.text not in text
    assert edit.without in text


def test_a_rule_whose_text_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "a rule that was", Edit("planner.cpp", "kOld = 1;", "kOld = 0;"))
    with pytest.raises(RuntimeError, match=r"planner.cpp has 'kOld = 1;' 0 times.*a rule that was"):
        ablations.text_without("a rule that was")


def test_each_program_is_replayed_as_it_is_and_without_each_rule() -> None:
    cases = ablations.cases(Options())
    programs = {case.split(": ")[0] for case in cases}
    assert len(cases) == len(programs) * (1 + len(RULES))
    assert f"growing_graph: {AS_IT_IS}" in cases
    assert "growing_graph: without recurrence" in cases


@pytest.mark.slow
def test_a_rule_is_missed_where_it_was_made_for() -> None:
    def driver_share(variant: str) -> float:
        measured = ablations.measure(f"growing_graph: {variant}", Options())
        return next(each.values[0] for each in measured if each.metric == "driver_share")

    rule = "larger chunks the more often they were stitched"
    assert driver_share(f"without {rule}") > 1.3 * driver_share(AS_IT_IS)
