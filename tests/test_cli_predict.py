"""`vramx predict`: a function of a module or a script, a table, JSON, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import assert_one_line_refusal

PROGRAM = """
import torch
from torch import nn

def makes_a_model():
    model = nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.zeros(16, 1024, device="cuda"), optimizer

def makes_a_step():
    model, x, optimizer = makes_a_model()
    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

MODEL = nn.Linear(1024, 1024, bias=False)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)

def is_a_step():
    MODEL(torch.zeros(16, 1024, device="cuda")).sum().backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()

if __name__ == "__main__":
    raise SystemExit("the main part runs")
"""
MATRICES = 3 * 1024 * 1024 * 4  # weights, gradients, momentum


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "predicted_program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("name", ["makes_a_step", "makes_a_model", "is_a_step"])
def test_a_function_of_a_script_is_predicted(run: Any, script: Path, name: str) -> None:
    code, out, err = run("predict", f"{script}:{name}", "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["rows"]
    assert 0 <= row["peak_bytes"]["live"] - MATRICES <= 4 * 16 * 1024 * 4
    assert list(row["peak_bytes"]) == ["live", "native", "expandable", "vramx"]


def test_a_function_of_a_module_is_predicted(
    run: Any, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    report = script.with_name("report")
    words = ("predict", "predicted_program:makes_a_step", "--policy", "live", "-o", report)
    assert run(*words) == (0, "", "")
    assert report.read_text().splitlines()[0].split()[:2] == ["level", "live"]
    assert "as it is" in report.read_text()
    assert_one_line_refusal(*run(*words), "it exists")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("train", "accepted are package.module:function and script.py:function"),
        ("no_such_module_there:step", "no_such_module_there cannot be imported"),
        ("json:no_such_function", "json has no function 'no_such_function'"),
    ],
)
def test_what_is_no_function_is_refused_in_one_line(run: Any, target: str, said: str) -> None:
    assert_one_line_refusal(*run("predict", target), said)
