"""The benchmarks of activation compression and of pretrained weights: models, figures, rows."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
from program_stand_ins import ON_CPU, ended_with, figures_of, line, rows, run_tiny

from benchmarks import activations, harness, real_weights
from benchmarks.harness import Measurement, Options, Request, RowWriter, UnavailableError
from benchmarks.models_workloads import WORKLOADS, Text, build
from benchmarks.programs import _activations, _cases, _launch
from benchmarks.programs._launch import PROGRAMS, Job, Outcome

LIBRARIES = {
    "llama": "transformers",
    "gpt2": "transformers",
    "bert": "transformers",
    "vit": "timm",
    "cnn": "torchvision",
    "gnn": "torch_geometric",
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROGRAM_SIZE", "tiny")


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_workload_learns_from_a_batch_of_either_size(name: str) -> None:
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    workload = build(name, torch.device("cpu"), seed=1)
    for is_large in (True, False):
        batch = workload.draw(torch.Generator().manual_seed(1), is_large)
        loss = workload.loss(_activations.forward(workload, batch), batch)
        loss.backward()
        assert torch.isfinite(loss)
    gradients = [parameter.grad for parameter in workload.model.parameters()]
    assert sum(found is not None and bool(found.any()) for found in gradients) > len(gradients) / 2


def test_a_text_counts_in_steps_of_its_own() -> None:
    text = Text(64, (50, 40), (2, 8), predicts_next=True)
    inputs, targets = text.draw(torch.Generator().manual_seed(1), True)
    assert inputs.shape == targets.shape == (50, 40)
    steps = targets.diff(dim=1) % 64
    assert (steps == steps[:, :1]).all()  # the targets follow the rule
    wrong = (inputs[:, 1:] != targets[:, :-1]).float().mean()  # the inputs in a quarter do not
    # Six standard deviations of 1950 draws; one error in 64 is right by chance.
    assert abs(float(wrong) - 0.25 * 63 / 64) < 6 * (0.25 * 0.75 / 1950) ** 0.5


@pytest.mark.slow
def test_a_case_measures_exact_and_compressed_in_one_process() -> None:
    done = _launch.run(Job(PROGRAMS / "_activations.py", ON_CPU, ("unet3d",), limit_s=120.0))
    assert done.status == "ok"
    found = figures_of(*done.reports)
    assert found["unet3d exact", "gradient_cosine"] == [1.0]
    assert 0.9 < found["unet3d int8", "gradient_cosine"][0] < 1.0  # it was compressed
    assert found["unet3d int8", "gradient_cosine"] > found["unet3d int4", "gradient_cosine"]
    assert found["unet3d int8", "packed_share"][0] > 0.5
    assert ("unet3d exact", "packed_share") not in found
    assert {case for case, metric in found if metric == "step_ms"} == {
        f"unet3d {way}" for way in ("exact", "int8", "int4")
    }


def test_a_training_ends_with_a_loss_of_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    _activations.compare_trainings("unet3d", torch.device("cpu"))
    found = figures_of(*map(json.loads, capsys.readouterr().out.splitlines()))
    exact, int8 = (found[f"unet3d {way}", "loss_trained"] for way in ("exact", "int8"))
    gaps = [our - loss for our, loss in zip(int8, exact, strict=True)]
    assert len(gaps) == len(_activations.SEEDS)
    assert found["unet3d int8", "loss_gap_same_seed"] == pytest.approx(gaps)
    assert found["unet3d exact", "loss_seed_deviation"] == [pytest.approx(stdev(exact))]


@pytest.mark.parametrize(
    ("what", "way"), [("checkpoint", "int8_inputs"), ("offload", "int8_offload_all")]
)
def test_recomputation_and_offload_are_compared_on_the_llama(what: str, way: str) -> None:
    pytest.importorskip("transformers")
    case = f"_activations.main('llama_{what}')"
    found = figures_of(*run_tiny(f"from benchmarks.programs import _activations; {case}"))
    assert found[f"llama_{what} exact", "gradient_cosine"] == [1.0]
    assert 0.99 < found[f"llama_{what} {way}", "gradient_cosine"][0] < 1.0  # it was compressed


def test_the_cosine_is_of_all_gradients_and_the_least_of_the_large_ones() -> None:
    size = 1 << 15
    ours = [torch.ones(size), torch.ones(size), torch.zeros(size), torch.ones(3)]
    theirs = [torch.ones(size), 2 * torch.ones(size), torch.zeros(size), -torch.ones(3)]
    theirs[1][: size // 2] *= -1
    total, least = _activations.cosines(ours, theirs)
    # Products: size + 0 - 3; squares: 2 size + 3 and 5 size + 3.
    assert total == pytest.approx((size - 3) / ((2 * size + 3) * (5 * size + 3)) ** 0.5)
    assert least == pytest.approx(0.0, abs=1e-6)


def test_a_checkpointed_model_is_restored() -> None:
    workload = build("unet3d", torch.device("cpu"), seed=1)
    block = workload.model.get_submodule("bottom")
    calls: list[str] = []

    def call(forward: Callable[..., Any], *inputs: Any) -> Any:
        calls.append("x")
        return forward(*inputs)

    batch = workload.draw(torch.Generator().manual_seed(1), False)
    with _activations.checkpointed(replace(workload, blocks=(block,)), call):
        _activations.forward(workload, batch)
    _activations.forward(workload, batch)
    assert calls == ["x"]
    assert "forward" not in block.__dict__


def test_every_case_has_a_model_and_something_to_compare() -> None:
    for case in set(activations.CASES) - set(activations.TRAININGS):
        name, _, what = case.partition("_")
        assert name in WORKLOADS
        assert len(_activations.WAYS[what]) > 1
    assert set(activations.MODELS) == set(WORKLOADS)


def test_rows_are_written_as_cases_end_and_a_crash_is_a_row(
    writer: RowWriter, tmp_path: Path
) -> None:
    lost = line("cnn exact", "step_ms", 1.0, 3.0)
    processes = {
        "llama": ended_with(line("llama exact", "step_ms", 1.0)),
        "cnn": ended_with(lost, status="failed: out of memory"),
        "gnn": ended_with(line("gnn exact", "step_ms", 2.0)),
    }
    figures, has_failed = _cases.measure(processes, processes.get, writer)
    assert has_failed
    written = rows(tmp_path)
    assert [row["case"] for row in written[-3:]] == ["cnn exact", "cnn", "gnn exact"]
    assert written[-2]["status"] == "failed: out of memory"
    assert figures["cnn exact", "step_ms"] == [1.0, 3.0]
    assert activations.SHEET.table(figures).row_count == 3


def test_trainings_run_beside_each_other(
    writer: RowWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=60.0)

    def run(job: Job, stop: threading.Event) -> Outcome:
        both.wait()
        status = "failed: out of memory" if job.arguments == ("cnn",) else "ok"
        return Outcome(status, (line(f"{job.arguments[0]} exact", "loss_trained", 1.0),), 1.0)

    monkeypatch.setattr(_launch, "run", run)
    figures, has_failed = _cases.measure_together(
        ("cnn", "gnn"), lambda case: Job(Path("x"), ON_CPU, (case,)), writer
    )
    assert has_failed
    assert [row["case"] for row in rows(tmp_path)] == ["cnn exact", "cnn", "gnn exact"]
    assert figures["gnn exact", "loss_trained"] == [1.0]
    assert _cases.measure_together((), lambda case: Job(Path("x"), ON_CPU), writer) == ({}, False)


def test_the_host_s_time_is_divided_by_what_is_packed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([10.0, 12.0, 16.0])

    def host_ms(function: Callable[[], Any]) -> float:
        function()
        return next(taken)

    monkeypatch.setattr(_activations, "host_ms", host_ms)
    workload = build("plainvit", torch.device("cpu"), seed=1)
    _activations.compare_hosts("plainvit", workload, _activations.WAYS[""])
    found = figures_of(*map(json.loads, capsys.readouterr().out.splitlines()))
    (packed,) = found["plainvit int8", "packed_tensors"]
    assert packed > 0
    assert found["plainvit int8", "host_us_per_packed"] == pytest.approx([2000 / packed])
    assert found["plainvit int4", "host_us_per_packed"] == pytest.approx([6000 / packed])
    assert ("plainvit exact", "host_us_per_packed") not in found


# --- pretrained weights ---------------------------------------------------------------------------


def test_what_nearly_cancels_is_apart_and_what_is_off_everywhere_is_not() -> None:
    usual = {f"weight {i}": 0.9998 for i in range(8)}
    judged, apart = real_weights.split({**usual, "bias": 0.2}, {**usual, "bias": 0.9})
    assert (len(judged), apart) == (8, [0.2])
    everywhere = dict.fromkeys(usual, 0.98)
    judged, apart = real_weights.split(usual, everywhere)
    assert (len(judged), apart) == (8, [])


def test_figures_of_a_way_are_rows_of_its_own(
    monkeypatch: pytest.MonkeyPatch, writer: RowWriter, tmp_path: Path
) -> None:
    def run_case(name: str, case: str, *_: Any) -> tuple[list[Measurement], str]:
        found = [(f"{way}/cosine_least", 0.9995) for way in real_weights.WAYS]
        return [Measurement(metric, "1", [value]) for metric, value in found], "ok"

    monkeypatch.setattr(harness, "run_case", run_case)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    request = Request(only=("key_biases",))
    parts, is_good = real_weights.run_all(Options(), request, writer)
    assert is_good
    assert parts[0].row_count == len(real_weights.WAYS)  # type: ignore[union-attr]
    rows = (tmp_path / "rows.csv").read_text()
    assert "key_biases recompute_all,cosine_least" in rows


def test_a_case_that_crashes_is_a_row_and_no_success(
    monkeypatch: pytest.MonkeyPatch, writer: RowWriter, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "run_case", lambda *_: ([], "failed: why"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    _, is_good = real_weights.run_all(Options(quick=True), Request(), writer)
    assert not is_good
    assert "pretrained" in (tmp_path / "rows.csv").read_text()


def test_without_its_packages_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, writer: RowWriter
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="all_minilm_l6_v2"):
        real_weights.run_all(Options(), Request(), writer)
