"""The benchmark of training under a limit: its goals, and its program on a processor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from program_stand_ins import make_writer, run_tiny

import vramx
from benchmarks import loss_parity, train_3b
from benchmarks.harness import Options, Request
from benchmarks.models_configs import llama_config
from benchmarks.programs._cases import Cases
from benchmarks.programs._launch import ALLOCATORS, Job, Outcome
from benchmarks.programs._longest import FULL, Tried, next_length
from benchmarks.programs._window import windowed
from vramx.sizes import GIB

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


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


@pytest.mark.parametrize("token_bytes", [20_000, 60_000, 400_000])
@pytest.mark.parametrize(
    ("hidden_bytes", "waste", "tries"),  # of another peak; the allocator's, which no line shows
    [(0, 1.0, 6), (2_000_000_000, 1.0, 9), (0, 1.1, 8), (4_000_000_000, 1.1, 12)],
)
def test_the_longest_sequence_is_found_in_few_steps(
    token_bytes: int, hidden_bytes: int, waste: float, tries: int
) -> None:
    """A step that is a little above the limit is tried where memory is wasted, and no more."""
    limit_bytes, base_bytes = 24_000_000_000, 6_000_000_000
    tried: list[Tried] = []
    length: int | None = 4096
    while length is not None:
        peak = base_bytes + max(hidden_bytes, length * token_bytes)
        tried.append(Tried(length, length / 10, peak, peak * waste <= limit_bytes))
        length = next_length(tried, limit_bytes, 1 << 21, 1e9, 1)
    longest = max(each.length for each in tried if each.fits)
    possible = (limit_bytes / waste - base_bytes) / token_bytes
    assert (FULL - 0.06) * possible <= longest <= possible
    assert len(tried) <= tries


def test_no_step_is_begun_that_takes_longer_than_it_may() -> None:
    tried = [Tried(32_768, 1_000.0, None, True)]
    assert next_length(tried, 0, 1 << 21, 1_960.0, 2) == 45_856  # 1.4 times as long, and 32
    assert next_length(tried, 0, 1 << 21, 1_000.0, 2) is None
    assert next_length(tried, 0, 33_000, 1e9, 2) is None


@needs_transformers
@pytest.mark.parametrize("row", ["3b_24_half", "3b_12_plan"])
def test_a_row_trains_and_reports(row: str) -> None:
    metrics = metrics_of(row)
    assert len(metrics["tokens_per_s"]) == 2
    assert all(value > 0 for value in metrics["tokens_per_s"])
    assert len(metrics["loss"]) == 3
    assert all(4 < loss < 7 for loss in metrics["loss"])  # log(300) = 5.7


@needs_transformers
@pytest.mark.parametrize("row", ["3b_24_longest", "3b_80_longest_liger"])
def test_a_row_of_the_longest_sequence_goes_to_the_end(row: str) -> None:
    assert metrics_of(row)["longest_tokens"] == [128]


@needs_transformers
def test_blocks_are_fused_within_a_window() -> None:
    """They are tried on the host before, where the kernel that has a window does not run."""
    from transformers import AutoModelForCausalLM

    config = llama_config(300, (64, 2, 160, 4, 2), max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config).train()
    with windowed(16, of_blocks=True):
        swapped = {each.name for each in vramx.optimize(model, "recompute_all").swapped}
    assert {"model.layers.0", "model.layers.1"} <= swapped


def metrics_of(row: str) -> dict[str, list[float]]:
    """Return what the program reports of a row, at its smallest size on this processor."""
    lines = run_tiny(f"from benchmarks.programs import _train_3b; _train_3b.main({row!r})")
    assert {line["case"] for line in lines} == {row}
    return {line["metric"]: line["values"] for line in lines}


@needs_transformers
@pytest.mark.parametrize("way", ["exact", "flash_recompute_all", "nearest"])
def test_a_recipe_learns_and_reports(way: str) -> None:
    losses = losses_of(way)
    assert list(losses) == ["validation_loss_at_2", "validation_loss_at_4"]
    assert all(4 < loss < 7 for (loss,) in losses.values())  # log(256) = 5.5


@needs_transformers
def test_recipes_begin_with_the_same_weights_and_batches() -> None:
    exact, found = (losses_of(way)["validation_loss_at_2"][0] for way in ("exact", "nearest"))
    assert found == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize(
    ("way", "gaps", "is_good"),
    [
        ("flash_int8", [0.001, -0.001, 0.002, 0.0, -0.002], True),
        ("flash_int8", [0.2, 0.21, 0.19, 0.2, 0.2], False),
        ("torchao_int8", [-0.2, -0.21, -0.19, -0.2, -0.2], True),
        ("nearest", [0.2, 0.21, 0.19, 0.2, 0.2], True),
        ("nearest", [0.001, -0.001, 0.002, 0.0, -0.002], False),
    ],
)
def test_recipes_are_no_worse_and_rounding_to_the_nearest_is(
    way: str, gaps: list[float], is_good: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exact = [5.0, 5.1, 4.9, 5.05, 4.95]

    def outcome(job: Any, _stop: Any) -> Outcome:
        name, seed = job.arguments
        place = loss_parity.SEEDS.index(int(seed))
        loss = exact[place] + (gaps[place] if name == way else 0.0)
        said = {"case": name, "metric": "validation_loss_at_500", "unit": "nat", "values": [loss]}
        return Outcome("ok", (said,), 1.0)

    monkeypatch.setattr(loss_parity._launch, "run", outcome)
    monkeypatch.setattr(Cases, "job", lambda *_: lambda name: Job(Path(name), ALLOCATORS[0]))
    request, writer = Request(only=(way,)), make_writer(tmp_path)
    assert loss_parity.run_all(Options(), request, writer)[1] is is_good


def losses_of(way: str) -> dict[str, list[float]]:
    found = run_tiny(f"from benchmarks.programs import _loss_parity as p; p.main({way!r}, '1')")
    return {each["metric"]: each["values"] for each in found if "loss" in each.get("metric", "")}
