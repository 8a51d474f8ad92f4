"""The benchmark of training under a limit: its goals, and its program on a processor."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from program_stand_ins import run_tiny

from benchmarks import train_3b
from vramx.sizes import GIB


def figures(**speeds: float) -> Any:
    found = {}
    for name, speed in speeds.items():
        row = name.removeprefix("row_")
        found[row, "tokens_per_s"] = [speed, speed * 2, speed / 2]
        found[row, "peak_reserved_bytes"] = [11.0 * GIB]
    return found


def test_a_plan_is_compared_with_the_best_of_its_model_and_limit() -> None:
    found = figures(
        row_3b_24_all=20_000, row_3b_24_half=27_000, row_3b_12_all=90_000, row_3b_24_plan=29_500
    )
    judged = {
        (row, metric): (value, is_met) for row, metric, value, is_met in train_3b.goals(found)
    }
    assert judged["3b_24_plan", "tokens_per_s"] == (29_500, True)
    assert judged["3b_24_plan", "of_the_grid"] == (pytest.approx(29_500 / 27_000), False)
    assert judged["3b_24_plan", "peak_reserved_bytes"] == (11 * GIB, True)
    assert {row for row, _ in judged} == {"3b_24_plan"}


def test_a_peak_above_the_limit_is_missed() -> None:
    found = figures(row_3b_12_plan=30_000)
    found["3b_12_plan", "peak_reserved_bytes"] = [12.5 * GIB]
    assert ("3b_12_plan", "peak_reserved_bytes", 12.5 * GIB, False) in train_3b.goals(found)
    assert "MISSED" in str([list(column.cells) for column in train_3b.SHEET.table(found).columns])


def test_longest_sequences_are_compared_with_those_without() -> None:
    found = {("3b_24_longest", "longest_tokens"): [81_920.0]}
    assert train_3b.goals(found) == []
    found["3b_24_longest_liger", "longest_tokens"] = [40_960.0]
    assert train_3b.goals(found) == [("3b_24_longest", "times_as_long", 2.0, True)]
    found["3b_24_longest_liger", "longest_tokens"] = [51_200.0]
    assert train_3b.goals(found) == [("3b_24_longest", "times_as_long", 1.6, False)]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("row", ["3b_24_half", "3b_12_plan"])
def test_a_row_trains_and_reports(row: str) -> None:
    metrics = metrics_of(row)
    assert len(metrics["tokens_per_s"]) == 2
    assert all(value > 0 for value in metrics["tokens_per_s"])
    assert len(metrics["loss"]) == 3
    assert all(4 < loss < 7 for loss in metrics["loss"])  # log(300) = 5.7


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("row", ["3b_24_longest", "3b_24_longest_liger"])
def test_a_row_of_the_longest_sequence_goes_to_the_end(row: str) -> None:
    assert metrics_of(row)["longest_tokens"] == [128]


def metrics_of(row: str) -> dict[str, list[float]]:
    """Return what the program reports of a row, at its smallest size on this processor."""
    lines = run_tiny(f"from benchmarks.programs import _train_3b; _train_3b.main({row!r})")
    assert {line["case"] for line in lines} == {row}
    return {line["metric"]: line["values"] for line in lines}
