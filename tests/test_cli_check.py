"""`vramx check`: peaks beside a baseline and a limit; what is above fails and is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import assert_one_line_refusal
from snapshot_writer import KEPT, MIB, MODEL, Recording


def recorded(path: Path, *, kept: int, oom: bool = False) -> Path:
    recording = Recording()
    recording.alloc(100 * MIB, MODEL)
    recording.alloc(kept, KEPT)
    if oom:
        recording.oom(MIB)
    return recording.save(path)


@pytest.fixture
def baseline(run: Any, tmp_path: Path) -> Path:
    path = tmp_path / "mem.json"
    snapshot = recorded(tmp_path / "before.pickle", kept=100 * MIB)
    code, out, err = run("check", snapshot, "--baseline", path, "--update")
    assert (code, err) == (0, "")
    assert out == f"The figures of before.pickle are in {path}.\n"
    return path


def test_a_baseline_holds_the_figures(baseline: Path) -> None:
    assert json.loads(baseline.read_text()) == {
        "schema": 1,
        "peak_live_bytes": 200 * MIB,
        "peak_reserved_bytes": 200 * MIB,
        "failed_requests": 0,
        "stacks": {
            "model.py:12 forward < train.py:40 train (linear.py:134 forward)": 100 * MIB,
            "train.py:52 keep < train.py:40 train": 100 * MIB,
        },
    }


@pytest.mark.parametrize(
    ("kept", "tolerance", "code"),
    [
        (50 * MIB, [], 0),
        (100 * MIB, ["--tolerance", "0%"], 0),
        (104 * MIB, [], 0),
        (106 * MIB, [], 1),
        (106 * MIB, ["--tolerance", "3.5%"], 0),
        (102 * MIB, ["--tolerance", "0%"], 1),
    ],
)
def test_a_peak_above_the_tolerance_fails(
    run: Any, tmp_path: Path, baseline: Path, kept: int, tolerance: list[str], code: int
) -> None:
    snapshot = recorded(tmp_path / "now.pickle", kept=kept)
    found, out, err = run("check", snapshot, "--baseline", baseline, *tolerance, "--json")
    report = json.loads(out)
    assert (found, err) == (code, "")
    assert report["ok"] is (code == 0)
    assert report["figures"][0]["value"] == 100 * MIB + kept


def test_what_grew_most_is_named(run: Any, tmp_path: Path, baseline: Path) -> None:
    snapshot = recorded(tmp_path / "now.pickle", kept=140 * MIB)
    code, out, _ = run("check", snapshot, "--baseline", baseline)
    assert code == 1
    assert out.splitlines() == [
        "FAIL peak live       0.234 GiB; 0.199 GiB accepted (+20.0% of 0.195 GiB)",
        "FAIL peak reserved   0.234 GiB; 0.199 GiB accepted (+20.0% of 0.195 GiB)",
        "ok   failed requests 0; 0 accepted",
        "     grew most: train.py:52 keep < train.py:40 train, +40.00 MiB",
    ]


def test_a_failed_request_fails_at_any_size(run: Any, tmp_path: Path, baseline: Path) -> None:
    snapshot = recorded(tmp_path / "now.pickle", kept=MIB, oom=True)
    assert run("check", snapshot, "--baseline", baseline)[0] == 1
    code, out, _ = run("check", snapshot, "--limit", "1GiB")
    assert code == 1
    assert "FAIL failed requests 1; 0 accepted" in out


@pytest.mark.parametrize(("limit", "code"), [("200MiB", 0), ("199MiB", 1), ("18GiB", 0)])
def test_a_limit_bounds_what_is_reserved(run: Any, tmp_path: Path, limit: str, code: int) -> None:
    snapshot = recorded(tmp_path / "now.pickle", kept=100 * MIB)
    assert run("check", snapshot, "--limit", limit)[0] == code


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read: No such file"),
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it is no baseline of schema 1"),
        ('{"schema": 2}', "it is no baseline of schema 1"),
        ('{"schema": 1}', "peak_live_bytes is None; a number from 0 on is accepted"),
        ('{"schema": 1, "peak_live_bytes": -1}', "peak_live_bytes is -1"),
        ('{"schema": 1, "peak_live_bytes": true}', "peak_live_bytes is True"),
    ],
)
def test_a_baseline_that_is_none_is_refused(
    run: Any, tmp_path: Path, content: str | None, what: str
) -> None:
    path = tmp_path / "mem.json"
    if content is not None:
        path.write_text(content)
    snapshot = recorded(tmp_path / "now.pickle", kept=MIB)
    assert_one_line_refusal(*run("check", snapshot, "--baseline", path), f"{path}: {what}")
