"""vramx.plan on two GPUs: both processes have one plan, and neither exceeds the budget."""

from __future__ import annotations

import sys

import pytest

from gpu import runner
from gpu.runner import PROGRAMS

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_both_processes_train_as_planned_within_the_budget(kind: str) -> None:
    workers = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *workers, str(PROGRAMS / "two_gpu_plan.py"), kind]
    plans = runner.run(command, runner.environment({})).facts()["plans"]
    for plan in plans:
        first, second = plan["texts"]
        assert first == second
        assert max(plan["peaks"]) <= plan["budget"]
        assert max(plan["peaks"]) >= 0.9 * plan["planned"]
    assert plans[0]["planned"] < 0.9 * plans[-1]["planned"]
    assert plans[0]["words"] != plans[-1]["words"]
