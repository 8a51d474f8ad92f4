"""The benchmark of a language model: paired seeds, the equivalence test, its rows and picture."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from program_stand_ins import ON_CPU, rows

from benchmarks import language_model
from benchmarks.harness import RowWriter
from benchmarks.language_model import QUANTILES_95, compare
from benchmarks.models_gpt import Gpts, Shape, draw_starts, standard_library_text, windows
from benchmarks.programs import _language_model, _launch
from benchmarks.programs._launch import PROGRAMS, Job, Outcome

SHAPE = Shape(width=32, layers=2, heads=2, length=16, rows=2)


def test_the_quantiles_are_students() -> None:
    """By integrating the density numerically: 95 % of it lies below each."""
    for degrees, quantile in enumerate(QUANTILES_95, 1):
        t = torch.linspace(0, quantile, 20_001, dtype=torch.float64)
        density = (1 + t * t / degrees) ** (-(degrees + 1) / 2)
        half = torch.tensor(degrees / 2, dtype=torch.float64)
        log_scale = torch.lgamma(half + 0.5) - torch.lgamma(half)
        scale = log_scale.exp() / (degrees * torch.pi) ** 0.5
        below = 0.5 + float(scale * torch.trapezoid(density, t))
        # Half a unit of the table's fourth decimal, times the density there, 0.1 at most.
        assert below == pytest.approx(0.95, abs=1e-5), degrees


@pytest.mark.parametrize(
    ("gaps", "is_shown"),
    [
        ([0.001, -0.001, 0.002, -0.002, 0.0], True),
        ([0.011, 0.009, 0.012, 0.008, 0.010], False),  # as steady as can be, and too far
        ([0.03, -0.03, 0.02, -0.02, 0.0], False),  # zero on average, and too scattered to say so
        ([0.0, 0.0], True),
    ],
)
def test_equivalence_is_shown_by_small_and_steady_gaps_only(
    gaps: list[float], is_shown: bool
) -> None:
    assert compare(gaps, margin=0.01).is_shown is is_shown


def test_a_seed_learns_the_same_in_any_company() -> None:
    text = torch.randint(0, 256, (4096,), dtype=torch.uint8)

    def of(seeds: list[int]) -> tuple[Any, Any]:
        models = Gpts(seeds, SHAPE)
        tokens, targets = windows(text, draw_starts(text, seeds, 1, SHAPE)[0], SHAPE.length)
        losses = models.losses(models(tokens), targets)
        losses.sum().backward()
        place = seeds.index(5)
        gradients = [parameter.grad[place] for parameter in models.parameters()]
        return losses[place].detach(), gradients

    alone, beside = of([5]), of([3, 5, 8])
    torch.testing.assert_close(alone, beside)


def test_the_validation_text_is_of_other_files(tmp_path: Path, monkeypatch: Any) -> None:
    for index in range(60):
        (tmp_path / f"module{index}.py").write_text(f"name = {index}\n" * 3)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("never")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    train, validation = (bytes(part.tolist()).decode() for part in standard_library_text())
    learnt, checked = set(train.split("\n")), set(validation.split("\n"))
    assert learnt & checked <= {""}
    assert len(learnt | checked - {""}) >= 60
    assert len(checked) > 1
    assert "never" not in train + validation


def test_the_rate_rises_and_falls_to_zero() -> None:
    shares = [_language_model.share_of_rate(step, 100, 10) for step in range(1, 101)]
    assert max(shares) == shares[9] == 1.0
    assert shares[0] == 0.1
    assert shares[-1] == 0.0
    assert shares[:10] == sorted(shares[:10])
    assert shares[9:] == sorted(shares[9:], reverse=True)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROGRAM_SIZE", "tiny")


@pytest.mark.slow
def test_a_process_trains_all_seeds_and_says_what_was_packed(tiny: None) -> None:
    job = Job(PROGRAMS / "_language_model.py", ON_CPU, ("int8_stochastic",), limit_s=120.0)
    done = _launch.run(job)
    assert done.status == "ok"
    found = {item["metric"]: item["values"] for item in done.reports}
    assert len(found["validation_loss_at_4"]) == 5
    assert found["packed_share"][0] > 0.5
    assert found["saved_ratio"][0] > 1.5


def test_seeds_apart_say_what_all_would_have_said(
    tiny: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*seeds: str) -> Outcome:
        _language_model.main("exact", *seeds)
        return Outcome("ok", tuple(map(json.loads, capsys.readouterr().out.splitlines())), 1.0)

    whole = said()
    found = language_model.merged([said(str(seed)) for seed in language_model.SEEDS])
    assert [line["metric"] for line in found.reports] == [line["metric"] for line in whole.reports]
    for ours, theirs in zip(found.reports[:2], whole.reports[:2], strict=True):
        assert ours["values"] == pytest.approx(theirs["values"], rel=1e-5)


def test_a_seed_that_failed_is_a_way_that_failed() -> None:
    line = {"metric": "validation_loss_at_250", "values": [2.0]}
    found = language_model.merged(
        [Outcome("ok", (line, line), 1.0), Outcome("failed: killed", (line,), 2.0)]
    )
    assert (found.status, len(found.reports)) == ("failed: killed", 1)


@pytest.mark.parametrize("way", ["exact", "exact_again", "int8_nearest", "optimised_int8"])
def test_only_the_way_differs_between_processes(
    tiny: None, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    if way in _language_model.LEVELS:
        pytest.importorskip("transformers")

    def last_losses(way: str) -> torch.Tensor:
        _language_model.Trainer(way, torch.device("cpu")).run(way)
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        found = {item["metric"]: item["values"] for item in lines}
        return torch.tensor(found["validation_loss_at_4"])

    exact, found = last_losses("exact"), last_losses(way)
    assert torch.equal(exact, found) == (way == "exact")
    # What four small steps can make of it; another seed is 0.01 nat away.
    torch.testing.assert_close(exact, found, rtol=0, atol=1e-3)


def test_separate_blocks_compute_what_the_stacked_ones_do() -> None:
    pytest.importorskip("transformers")
    from benchmarks.models_gpt2 import SeparateGpts

    stacked, separate = Gpts([3, 5], SHAPE).double(), SeparateGpts([3, 5], SHAPE).double()
    tokens = torch.randint(0, 256, (2, SHAPE.rows, SHAPE.length))
    for models in (stacked, separate):
        models.losses(models(tokens), tokens).sum().backward()
    expected = stacked.get_parameter("blocks.1.up.weight").grad
    found = separate.get_parameter("blocks.1.of_seed.0.mlp.c_fc.weight").grad
    assert expected is not None
    torch.testing.assert_close(expected[0], found)
    torch.testing.assert_close(stacked.tokens.grad, separate.tokens.grad)


def curve(gap: float) -> tuple[dict[str, Any], ...]:
    """Two evaluations; the last with what must come out of it, the first with anything."""
    last = [2.0 + 0.1 * seed + gap for seed in range(5)]
    return (
        {"metric": "validation_loss_at_250", "values": [9.0] * 5},
        {"metric": "validation_loss_at_3000", "values": last},
        {"metric": "packed_share", "values": [0.9]},
    )


GAPS = {"exact": 0.0, "int8_stochastic": 0.001, "int4_nearest": 0.5}


def fake_train(way: str, stop: threading.Event) -> Outcome:
    if way not in GAPS:
        return Outcome("failed: out of memory", (), 1.0)
    lines = tuple({"case": way, "unit": "nat", **item} for item in curve(GAPS[way]))
    return Outcome("ok", lines, 1.0)


def test_curves_and_verdicts_are_rows_and_a_failure_is_one(
    writer: RowWriter, tmp_path: Path
) -> None:
    ways = ("exact", "int8_stochastic", "int8_nearest", "int4_nearest")
    curves, has_failed = language_model.train_all(ways, fake_train, writer)
    assert has_failed
    assert set(curves) == set(GAPS)
    verdicts = language_model.judge(curves)
    # The seeds deviate by 0.158: a quarter of it is far more than 0.001.
    assert verdicts["int8_stochastic"].is_shown
    assert verdicts["int8_stochastic"].margin == pytest.approx(0.25 * 0.15811, rel=1e-4)
    assert not verdicts["int4_nearest"].is_shown
    language_model.write_verdicts(verdicts, curves, writer)
    written = {(row["case"], row["metric"]): row for row in rows(tmp_path)}
    assert written["int8_nearest", ""]["status"] == "failed: out of memory"
    assert written["exact", "validation_loss_at_250"]["samples"] == "9 9 9 9 9"
    assert float(written["int8_stochastic against exact", "gap"]["median"]) == pytest.approx(0.001)
    assert written["int4_nearest against exact", "is_equivalent"]["median"] == "0.0"
    assert language_model.table(verdicts).row_count == 2


def test_the_exact_way_is_always_among_the_chosen_and_without_it_nothing_is_judged() -> None:
    assert language_model.chosen(["int4_nearest"]) == ("exact", "int4_nearest")
    assert language_model.chosen(()) == language_model.WAYS
    assert language_model.judge({"int8_nearest": {1: [1.0, 2.0]}}) == {}
