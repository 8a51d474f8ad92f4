"""The benchmark of pretrained weights: its rows, and which parameters are counted apart."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, real_weights
from benchmarks.harness import Measurement, Options, Request, RowWriter, UnavailableError


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
