"""The marks of the pytest plugin on a real GPU, in a run of pytest of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from child_processes import python

pytestmark = pytest.mark.gpu

TESTS = """
import pytest, torch
MIB = 1 << 20
KEPT = []
def take(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
@pytest.mark.vram_limit("8MiB")
@pytest.mark.vram_leak
def test_within():
    take(8 * MIB)
@pytest.mark.vram_limit("8MiB")
def test_above():
    take(9 * MIB)
@pytest.fixture
def model():
    return torch.nn.Linear(1024, 1024, device="cuda")
@pytest.mark.vram_leak
def test_trains(model):
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
@pytest.mark.vram_leak
def test_leaks():
    torch.cuda.memory._record_memory_history(stacks="python")
    KEPT.append(take(3 * MIB))
"""


def test_limits_and_leaks(tmp_path: Path) -> None:
    path = tmp_path / "test_memory.py"
    path.write_text(TESTS)
    # Where vramx is installed pytest would load the plugin a second time.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = python(
        "-m", "pytest", "-p", "vramx.testing.plugin", "-q", str(path), env=environment, timeout=300
    )
    assert "1 failed, 3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "9.00 MiB on cuda:0 at its peak" in done.stdout
    assert "3.00 MiB in 1 at" in done.stdout
    assert "test_memory.py:6 take" in done.stdout
