"""Real models train on CPU torch through the core while it defragments, bit for bit as without it.

Every tensor lives in the allocator on a simulated device with real bytes: stitched blocks are
second mappings of pages, memory that was given back faults, and freed and fresh memory is poisoned,
so that a byte in the wrong place changes a loss. Each program runs in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_processes import python

pytest.importorskip("torch", reason="torch is not installed")
core = pytest.importorskip("vramx._core", reason="the compiled core is not built")

TESTS = Path(__file__).resolve().parent
MODELS = ("perceptron", "convolutional", "transformer")
DEFECTS = ("early_free", "shared_address")
STEPS = (20, pytest.param(200, marks=pytest.mark.slow))
LIMIT_S = 240


@dataclass(frozen=True)
class Outcome:
    """What a program wrote: its arrays by name, and what the allocator reported."""

    arrays: dict[str, np.ndarray]
    report: dict[str, Any]

    def differences(self, from_: Outcome | None = None) -> list[str]:
        """Name what this training and a plain one, of another run or of this, do not share."""
        plain = (from_ or self).arrays
        return [
            name
            for name in plain
            if name.startswith("plain/")
            and plain[name].tobytes() != self.arrays[name.replace("plain", "core")].tobytes()
        ]


@pytest.fixture(scope="module", params=STEPS)
def steps(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def outcome(steps: int, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Run everything once; return a function from the name of a run to its outcome."""
    folder = tmp_path_factory.mktemp("cpu_training")
    # The perceptron computes with nothing but numbers: a wrong one is not taken for an index.
    runs = [f"{model}-core" for model in MODELS] + [f"perceptron-{defect}" for defect in DEFECTS]
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    what = ("-m", "cpu_torch.program", str(folder), str(steps), *runs)
    done = python(*what, cwd=TESTS, env={**os.environ, "PYTHONPATH": path}, timeout=LIMIT_S)

    def of(run: str) -> Outcome:
        report = folder / f"{run}.json"
        assert report.exists(), f"{run}: exit {done.returncode}\n{done.stderr[-4000:]}"
        with np.load(folder / f"{run}.npz") as arrays:
            return Outcome(dict(arrays), json.loads(report.read_text()))

    return of


@pytest.fixture(scope="module", params=MODELS)
def disturbed(request: pytest.FixtureRequest, outcome: Callable[[str], Outcome]) -> Outcome:
    """A model that was trained through the core while another thread gave its memory back."""
    return outcome(f"{request.param}-core")


def test_losses_and_parameters_are_bit_for_bit_those_of_plain_torch(
    disturbed: Outcome, steps: int
) -> None:
    assert len(disturbed.arrays["plain/losses"]) == steps
    assert np.isfinite(disturbed.arrays["plain/losses"]).all()
    assert disturbed.differences() == []


def test_training_ran_on_the_core(disturbed: Outcome, steps: int) -> None:
    counts, stats = disturbed.report["counts"], disturbed.report["stats"]
    # The allocator counts what it was asked for, the harness what it handed to torch.
    assert counts["blocks"] == stats["allocation"]["all"]["allocated"]
    assert counts["bytes"] == stats["requested_bytes"]["all"]["allocated"]
    # Every step makes each parameter's gradient and every layer's output anew.
    tensors = sum(name.startswith("core/") for name in disturbed.arrays)
    assert counts["blocks"] > steps * tensors


def test_stitched_blocks_were_built_and_found_again(disturbed: Outcome) -> None:
    assert disturbed.report["stats"]["num_stitches"] > 0
    assert disturbed.report["stats"]["num_alias_hits"] > 0


def test_memory_was_given_back_while_training(disturbed: Outcome) -> None:
    assert disturbed.report["disturbances"] > 0
    assert disturbed.report["stats"]["num_device_free"] > 0


def test_out_of_memory_is_torchs_error_and_training_goes_on(disturbed: Outcome) -> None:
    assert disturbed.report["ooms"] == 1
    assert disturbed.report["stats"]["num_ooms"] == 1


def test_every_invariant_holds_while_training_and_after(disturbed: Outcome) -> None:
    assert disturbed.report["broken"] == ""
    assert disturbed.report["check"] == ""


def test_nothing_is_left_once_every_tensor_is_freed(disturbed: Outcome) -> None:
    # Tensors of the plain training were freed after the core took over: none of them went to it.
    assert disturbed.report["counts"]["refused_frees"] == 0
    assert disturbed.report["counts"]["frees"] == disturbed.report["counts"]["blocks"]
    assert disturbed.report["stats"]["allocated_bytes"]["all"]["current"] == 0
    assert disturbed.report["held_bytes"] == 0


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_noticed(defect: str, outcome: Callable[[str], Outcome]) -> None:
    spoiled = outcome(f"perceptron-{defect}")
    assert spoiled.report["counts"]["defects"] > 0
    assert "plain/losses" in spoiled.differences(outcome("perceptron-core"))
