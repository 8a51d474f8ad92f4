"""vramx.fit_batch on two GPUs under DDP: one answer, that of a bisection, and nobody waits."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest

from gpu import runner
from gpu.runner import PROGRAMS

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

# What kernels are chosen, and with them their workspaces, is not the same for every batch.
NEAR = 0.05


def both(kind: str) -> list[dict[str, Any]]:
    """Return what the two processes printed."""
    workers = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *workers, str(PROGRAMS / "two_gpu_fit.py"), kind]
    outcome = runner.run(command, runner.environment({}))
    assert outcome.code == 0, str(outcome)
    facts = [json.loads(x) for x in outcome.stdout.splitlines() if x.startswith("{")]
    assert len(facts) == 2, str(outcome)
    return sorted(facts, key=lambda each: int(each["rank"]))


def test_both_have_the_batch_that_the_smaller_one_can_take() -> None:
    first, second = both("agree")
    assert first["batch"] == second["batch"]
    assert first["largest"] == second["largest"]
    assert abs(first["batch"] - first["largest"]) <= max(1, NEAR * first["largest"])
    assert first["trials"] <= math.ceil(math.log2(first["batch"] + 1)) + 3


def test_out_of_memory_in_one_of_them_leaves_none_waiting() -> None:
    waiting, failed = both("surprise")
    assert waiting["said"].startswith("FailedTogetherError: another process failed in a step")
    assert failed["said"].startswith("FailedTogetherError: out of memory in a step")
