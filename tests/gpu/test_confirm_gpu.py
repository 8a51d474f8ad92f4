"""What `vramx explain` says that a policy holds is what a program of it holds, on a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import random, sys, torch
chosen = random.Random(7)
torch.cuda.init()
if len(sys.argv) > 1:
    torch.cuda.memory._record_memory_history(stacks="python")
kept = []
for _ in range(400):
    kept.append(torch.empty(chosen.randrange(1 << 20, 48 << 20), dtype=torch.uint8, device="cuda"))
    if len(kept) > 40:
        del kept[chosen.randrange(len(kept))]
if len(sys.argv) > 1:
    torch.cuda.memory._dump_snapshot(sys.argv[1])
"""


@pytest.mark.alone
def test_what_is_said_of_each_policy_is_what_it_holds(tmp_path: Path) -> None:
    program, snapshot = tmp_path / "program.py", tmp_path / "run.pickle"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, str(program), str(snapshot)], check=True, timeout=300)
    explain = [sys.executable, "-m", "vramx", "explain", str(snapshot), "--json", "--confirm"]
    done = subprocess.run(
        [*explain, "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    found = {each["policy"]: each for each in report["confirmed"]}
    assert set(found) == {"expandable", "vramx"}
    assert all(each["ok"] for each in found.values()), found
    assert done.returncode == 0
