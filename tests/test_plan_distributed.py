"""vramx.plan and vramx.fit_batch in two processes: one answer, where they measure otherwise too."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_tools import SHARDS_ON_HOSTS, run_on_two
from fit_tools import Device
from plan_tools import LEVELS, Counter, Layer, Stack, cap_device, peak_of_loop
from torch import nn

import vramx
from vramx.errors import VramxError
from vramx.planning import meters
from vramx.planning.fit import fit_batch


def measure_by_operations(rank: int) -> None:
    """Have a call take a time for each operation, and in the second process another one."""

    def busy(self: Any, function: Any, calls: int, samples: int = 3) -> meters.Busy:
        with Counter() as counter:
            function()
        return meters.Busy(counter.count * (1 + 0.3 * rank), 0.0)

    meters.HostMeter.busy = busy  # type: ignore[method-assign]


def said_of(plan: Any) -> dict[str, Any]:
    return {"words": plan.words, "measured": plan.measured_bytes, "text": str(plan)}


def plan_apart(rank: int) -> dict[str, Any]:
    """Plan what no DDP wraps; the second process has the larger sample."""
    measure_by_operations(rank)
    torch.manual_seed(0)
    model, sample = Stack(3), torch.randn(512 * (1 + rank), 8)
    optimizer, another = (torch.optim.AdamW(model.parameters()) for _ in "12")
    widest = vramx.plan(model, sample, levels=LEVELS, optimizer=optimizer)
    low = widest.with_budget(sample, "smallest").measured_bytes
    # Each asks for another budget: the smaller one is that of both.
    budget = (low + widest.measured_bytes) // 2 + 1000 * rank
    plan = widest.with_budget(sample, budget).apply()
    peak = peak_of_loop(model, lambda: model(sample).mean().backward(), another)
    plan.undo()
    rows = torch.randn(512, 8)
    return {**said_of(plan), "budget": budget, "peak": peak, "rows": plan.fit_batch(rows)}


def plan_replica(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    replica = nn.parallel.DistributedDataParallel(Stack(4))
    sample = torch.randn(512 * (1 + rank), 8)
    plan = vramx.plan(replica, sample, "smallest", levels=LEVELS).apply()
    replica(sample).mean().backward()
    grads = [p.grad for p in replica.parameters() if p.grad is not None]
    return {**said_of(plan), "sum": float(sum(g.double().sum() for g in grads))}


def plan_sharded(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = Stack(3), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sample = torch.randn(512 * (1 + rank), 8)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = vramx.plan(model, sample, "smallest", levels=LEVELS, optimizer=optimizer).apply()
    model(sample).mean().backward()
    optimizer.step()
    return said_of(plan)


TICKS = itertools.count()


class Stateful(Layer):
    """A block that reads a clock in one of the processes."""

    counts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).sin().exp().sin()
        return y * next(TICKS) if self.counts else y


def plan_unsteady(rank: int) -> dict[str, Any]:
    Stateful.counts = rank == 1
    return said_of(vramx.plan(Stack(2, Stateful), torch.randn(512, 8), "smallest", levels=LEVELS))


def plan_wrongly(how: str, rank: int) -> dict[str, Any]:
    model, sample = Stack(3), torch.randn(512, 8)
    options: dict[str, Any] = {"levels": LEVELS}
    if how == "argument" and rank:
        options["levels"] = ("int9",)
    if how == "step" and rank:
        sample = torch.randn(512, 9)
    if how == "blocks":
        model = Stack(3 + rank)
    if how == "budget":
        options["budget"] = "smallest" if rank else None
    try:
        vramx.plan(model, sample, **options)
    except (VramxError, RuntimeError) as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"said": "a plan"}


def plan_on_a_small_device(rank: int) -> dict[str, Any]:
    """The model as it is fits in one process only, and so in none."""
    model, sample = Stack(4), torch.randn(512, 8)
    widest = vramx.plan(model, sample, levels=LEVELS)
    smallest = widest.with_budget(sample, "smallest")
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            cap_device(patch, (widest.measured_bytes + smallest.measured_bytes) // 2)
        return said_of(vramx.plan(model, sample, levels=LEVELS))


@pytest.mark.slow
def test_processes_that_measure_otherwise_have_one_plan(tmp_path: Path) -> None:
    first, second = run_on_two(plan_apart, tmp_path)
    assert first["text"] == second["text"]
    assert first["words"] == second["words"]
    assert set(first["words"].values()) == {"left", "recompute_all"}
    for each in (first, second):
        assert each["measured"] <= first["budget"] < second["budget"]
        assert each["peak"] <= each["measured"] * 1.001
    # The figures are those of the process that needs most.
    assert second["peak"] >= 0.97 * second["measured"]
    assert "plan the model that it made" in first["text"]
    assert first["rows"] == second["rows"] >= 1024


def test_a_replica_is_planned_as_it_is(tmp_path: Path) -> None:
    first, second = run_on_two(plan_replica, tmp_path)
    assert first["text"] == second["text"]
    assert first["sum"] == second["sum"]
    assert "DDP" not in first["text"]


@pytest.mark.slow
@pytest.mark.skipif(not SHARDS_ON_HOSTS, reason="this torch's FSDP2 does not average on hosts")
def test_a_sharded_model_is_planned_as_it_is(tmp_path: Path) -> None:
    first, second = run_on_two(plan_sharded, tmp_path)
    assert first["text"] == second["text"]
    assert "before: not run" in first["text"]
    assert "recompute_all" in first["words"].values()


@pytest.mark.slow
def test_what_does_not_repeat_in_one_process_is_recomputed_in_none(tmp_path: Path) -> None:
    first, second = run_on_two(plan_unsteady, tmp_path)
    assert first["words"] == second["words"] == {"blocks.0": "left", "blocks.1": "left"}
    assert "another process saw" in first["text"]
    assert "its result differs by" in second["text"]


@pytest.mark.slow
def test_out_of_memory_in_one_process_is_so_in_all(tmp_path: Path) -> None:
    first, second = run_on_two(plan_on_a_small_device, tmp_path)
    assert first["words"] == second["words"]
    assert "recompute_all" in first["words"].values()
    assert "before: out of memory in another process" in first["text"]


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("argument", ("another process failed reading its arguments", "'int9' is not accepted")),
        ("step", ("another process failed in a step of the model as it is", "shapes")),
        ("blocks", ("the processes differ in", "the processes differ in")),
        ("budget", ("the processes differ in", "the processes differ in")),
    ],
)
def test_an_error_of_one_process_is_one_of_all(
    how: str, texts: tuple[str, str], tmp_path: Path
) -> None:
    # run_on_two() fails where a process is still there after a minute.
    found = run_on_two(partial(plan_wrongly, how), tmp_path)
    for each, text in zip(found, texts, strict=True):
        assert text in each["said"]


# --- fitted batches -------------------------------------------------------------------------------


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


@pytest.mark.slow
# A collective of gloo's ends when its timeout does; where it raises this takes as long as four.
@pytest.mark.parametrize("quiet", [False, True])
def test_out_of_memory_in_one_process_does_not_leave_the_other_waiting(
    tmp_path: Path, quiet: bool
) -> None:
    # run_on_two() fails where a process is still there after a minute.
    both = run_on_two(partial(train, True, quiet), tmp_path, patience_s=6)
    waiting, failed = (each["said"] for each in both)
    assert waiting.startswith("FailedTogetherError: another process failed in a step")
    assert failed.startswith("FailedTogetherError: out of memory in a step")
