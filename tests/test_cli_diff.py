"""`vramx diff`: leaks are named and fail, what a clean program makes once does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from snapshot_writer import KEPT, LOSS, MIB, MODEL, Recording, stack

STATES = stack("lib/site-packages/torch/optim/adam.py:178 _init_group", "train.py:46 train")
KEPT_NAME = "train.py:52 keep < train.py:40 train"
LOSS_NAME = "train.py:44 train (functional.py:3504 cross_entropy)"


class Program:
    """A training loop; `leaky` keeps a tensor and the loss of each step."""

    def __init__(self, *, leaky: bool) -> None:
        self.recording = Recording()
        self.leaky = leaky
        self.steps = 0
        for _ in range(6):
            self.recording.alloc(MIB, stack("train.py:30 build"))

    def step(self) -> None:
        recording = self.recording
        activations = [recording.alloc((3 + self.steps) * MIB, MODEL) for _ in range(8)]
        loss = recording.alloc(4, LOSS)
        if self.steps == 0:  # as an optimizer does in its first step
            for _ in range(6):
                recording.alloc(MIB, STATES)
        for address in activations:
            recording.free(address)
        if self.leaky:
            recording.alloc(16 * MIB, KEPT)
        else:
            recording.free(loss)
        self.steps += 1

    def saves(self, folder: Path, *after: int) -> list[Path]:
        """Run, and save a snapshot after each of these numbers of steps."""
        paths = []
        for steps in after:
            while self.steps < steps:
                self.step()
            paths.append(self.recording.save(folder / f"step{steps}.pickle"))
        return paths


def leaks(out: str) -> list[str]:
    return [growth["name"] for growth in json.loads(out)["growth"] if growth["is_leak"]]


LEAKY = [(1, 3), (2, 9), (1, 2, 3), (0, 1, 2, 3), (0, 5, 6)]
CLEAN = [(1, 3), (0, 1), (0, 3), (2, 9), (1, 2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("leaky", "after", "steps"),
    [
        *((True, after, []) for after in LEAKY),
        *((False, after, steps) for after in CLEAN for steps in ([], ["--steps", "2"])),
    ],
)
def test_a_leak_is_named_and_fails_and_a_clean_run_passes(
    run: Any, tmp_path: Path, leaky: bool, after: tuple[int, ...], steps: list[str]
) -> None:
    paths = Program(leaky=leaky).saves(tmp_path, *after)
    code, out, err = run("diff", *paths, "--json", *steps)
    assert (code, err) == (leaky, "")
    assert leaks(out) == ([KEPT_NAME, LOSS_NAME] if leaky else [])


def test_what_is_made_once_is_growth_and_no_leak(run: Any, tmp_path: Path) -> None:
    paths = Program(leaky=False).saves(tmp_path, 0, 3)
    _, out, _ = run("diff", *paths)
    assert "+6.00 MiB   0 -> 6  1.00 MiB    train.py:46 train (adam.py:178 _init_group)" in out
    assert "No steady leak; what grew did so once" in out


def test_growth_in_a_single_step_is_no_steady_leak(run: Any, tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc(MIB, KEPT)
    first = recording.save(tmp_path / "first.pickle")
    for step in range(4):
        for _ in range(10):
            recording.free(recording.alloc(MIB, MODEL))
        if step == 1:
            recording.alloc(MIB, KEPT)
            recording.alloc(MIB, KEPT)
    code, out, _ = run("diff", first, recording.save(tmp_path / "last.pickle"), "--json")
    assert code == 0
    assert json.loads(out)["growth"][0]["tensors"] == [1, 3]


def test_steps_say_the_rate(run: Any, tmp_path: Path) -> None:
    paths = Program(leaky=True).saves(tmp_path, 2, 6)
    code, out, _ = run("diff", *paths, "--steps", "4")
    assert code == 1
    assert "Leak: 2 places keep more and more, 64.00 MiB so far, 16.00 MiB a step." in out
    code, out, _ = run("diff", *paths, "--steps", "5")  # less than a tensor a step
    assert code == 0


def test_without_the_history_in_between_steps_decide(run: Any, tmp_path: Path) -> None:
    program = Program(leaky=True)
    (first,) = program.saves(tmp_path, 2)
    program.saves(tmp_path, 6)
    last = program.recording.save(tmp_path / "late.pickle", last=3)
    assert run("diff", first, last)[0] == 0
    code, out, _ = run("diff", first, last, "--steps", "4", "--json")
    assert code == 1
    assert leaks(out) == [KEPT_NAME, LOSS_NAME]


def test_a_snapshot_and_itself_are_the_same(run: Any, snapshots: Path) -> None:
    path = snapshots / "train.pickle"
    code, out, _ = run("diff", path, path)
    assert code == 0
    assert out.endswith("No leak: nothing grew.\n")
