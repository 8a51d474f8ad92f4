"""vramx.fit_batch in two processes under DDP: one answer, and no process that waits for ever."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_tools import run_on_two
from fit_tools import Device
from torch import nn

from vramx.errors import VramxError
from vramx.planning.fit import fit_batch

CAPACITIES = (10_000, 6_000)  # of the two processes


def train(surprised: bool, quiet: bool, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    device = Device(CAPACITIES[rank])
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def step(batch: int) -> None:
        # Of the second process a batch from 60 on takes more than the line says.
        device.take(500 + 37 * batch + 100_000 * (surprised and rank == 1 and batch >= 60))
        # A GPU's collective that is ended may say nothing of it.
        with contextlib.suppress(RuntimeError) if quiet else contextlib.nullcontext():
            model(torch.randn(batch, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        found = fit_batch(step, memory=device, margin=0.0, global_batch=2000)
        said = [found.batch, found.micro_batch, found.accumulation]
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    except VramxError as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said}


def test_processes_agree_on_what_the_smallest_of_them_can_take(tmp_path: Path) -> None:
    # 2000 rows are 1000 a process, in as few and as even parts as there can be.
    largest = (CAPACITIES[1] - 500) // 37
    parts = -(-1000 // largest)
    expected = [largest, -(-1000 // parts), parts]
    found = run_on_two(partial(train, False, False), tmp_path)
    assert [each["said"] for each in found] == [expected, expected]


# A collective of gloo's ends when its timeout does; where it raises this takes as long as four.
@pytest.mark.parametrize("quiet", [pytest.param(False, marks=pytest.mark.slow), True])
def test_out_of_memory_in_one_process_does_not_leave_the_other_waiting(
    tmp_path: Path, quiet: bool
) -> None:
    # run_on_two() fails where a process is still there after a minute.
    both = run_on_two(partial(train, True, quiet), tmp_path, patience_s=6)
    waiting, failed = (each["said"] for each in both)
    assert waiting.startswith("FailedTogetherError: another process failed in a step")
    assert failed.startswith("FailedTogetherError: out of memory in a step")
