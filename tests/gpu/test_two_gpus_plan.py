"""vramx.plan and fit_batch on two GPUs: one answer for both processes, within the room of each."""

from __future__ import annotations

import json
import math

import pytest

from gpu import runner

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]
both_kinds = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@both_kinds
def test_both_processes_train_as_planned_within_the_budget(kind: str) -> None:
    plans = runner.on_two_gpus("two_gpu_plan", kind).facts()["plans"]
    for plan in plans:
        first, second = plan["texts"]
        assert first == second
        assert max(plan["peaks"]) <= plan["budget"]
        assert max(plan["peaks"]) >= 0.9 * plan["planned"]
    assert plans[0]["planned"] < 0.9 * plans[-1]["planned"]
    assert plans[0]["words"] != plans[-1]["words"]


@both_kinds
def test_both_processes_train_with_the_batch_that_the_smaller_has_room_for(kind: str) -> None:
    found = runner.on_two_gpus("two_gpu_fit", kind).facts()
    (batch, attempts, is_within), other = found["told"]
    assert other == [batch, attempts, True]
    assert is_within
    # What kernels are chosen, and with them their workspaces, is not the same every time.
    assert abs(batch - found["by_hand"]) <= max(1, 0.05 * found["by_hand"])
    assert attempts <= math.ceil(math.log2(batch + 1)) + 3
    assert found["steps"] == 200


def test_out_of_memory_in_one_of_them_leaves_none_waiting() -> None:
    outcome = runner.on_two_gpus("two_gpu_fit_fails")
    assert outcome.code == 0, str(outcome)
    told = [json.loads(line) for line in outcome.stdout.splitlines() if line.startswith("{")]
    waiting, failed = (each["said"] for each in sorted(told, key=lambda each: each["rank"]))
    assert waiting.startswith("FailedTogetherError: another process failed in a step")
    assert failed.startswith("FailedTogetherError: out of memory in a step")
