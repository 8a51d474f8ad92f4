"""The process that benchmarks/plan.py starts: it plans one model for budgets and runs the plans.

    python _plan.py CASE

Prints one line of JSON for each figure as soon as it is known. The model is measured once; budgets
lie evenly between the smallest that a plan stays within and the fastest plan's. Each plan is
then applied and run anew, as a user would: gradients are there, and no optimizer. Steps are timed
one in a turn, because clocks, and where memory lies after a plan is applied, change a step by more
than plans differ. On a processor bytes are counted and times mean nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import vramx
from benchmarks.models_workloads import WORKLOADS, Batch, Workload, build
from benchmarks.programs._activations import SEED, forward, take_step
from benchmarks.programs._report import Recorder, in_turn, report, sized, timed_ms
from vramx.planning.meters import meter_of

BUDGETS = sized(5, 5, quick=2)
WARMUP_STEPS = sized(2, 1)
TURNS = sized(21, 1, quick=3)


def main(case: str) -> None:
    recorder = Recorder(deterministic=False)
    with torch.device("meta"):
        WORKLOADS[case]()  # its library is imported ahead of the turn
    device = recorder.begin()
    workload = build(case, device, SEED)
    batch = workload.draw(torch.Generator(device).manual_seed(SEED), True)
    sample = partial(loss_of, workload, batch)
    start_s = time.perf_counter()
    fastest = vramx.plan(workload.model, sample, gradients="accumulated")
    report(f"{case} planning", "plan_s", "s", [time.perf_counter() - start_s])
    smallest = fastest.with_budget(sample, "smallest")
    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plans = {}
    for number, budget in enumerate(budgets_between(smallest, fastest, BUDGETS), 1):
        plan = fastest.with_budget(sample, budget)
        print(plan, file=sys.stderr)
        plans[f"{case} budget {number}"] = plan
    for name, plan in plans.items():
        report_plan(name, plan)
        with applied(plan, workload, batch):
            meter = meter_of(device, workload.model)
            report(name, "peak_bytes", "B", [peak_of(meter, partial(take_step, workload, batch))])
    compare_times(plans, workload, batch)


def budgets_between(smallest: vramx.Plan, fastest: vramx.Plan, count: int) -> list[int]:
    """Return so many budgets from what the one needs to what the other does."""
    low, high = smallest.needed_bytes, fastest.needed_bytes
    return [low + (high - low) * i // (count - 1) for i in range(count)]


def loss_of(workload: Workload, batch: Batch, _model: Any) -> torch.Tensor:
    torch.manual_seed(SEED)
    return workload.loss(forward(workload, batch), batch)


def report_plan(case: str, plan: vramx.Plan) -> None:
    """Report what a plan says of itself."""
    assert plan.budget_bytes is not None
    report(case, "budget_bytes", "B", [plan.budget_bytes])
    report(case, "predicted_bytes", "B", [plan.predicted_bytes])
    report(case, "planned_bytes", "B", [plan.measured_bytes])
    report(case, "predicted_ms", "ms", [plan.predicted_ms])
    report(case, "planned_ms", "ms", [plan.measured_ms])
    report_words(case, plan)


def report_words(case: str, plan: vramx.Plan) -> None:
    """Report how many blocks a plan treats in which way."""
    for word, count in sorted(Counter(plan.words.values()).items()):
        report(case, f"blocks_{word}", "1", [count])


@contextmanager
def applied(plan: vramx.Plan, workload: Workload, batch: Batch) -> Iterator[None]:
    """Have the model run as planned, past its first steps."""
    plan.apply()
    try:
        for _ in range(WARMUP_STEPS):
            take_step(workload, batch)
        yield
    finally:
        plan.undo()


def compare_times(plans: dict[str, vramx.Plan], workload: Workload, batch: Batch) -> None:
    """Report what the steps of each plan take; those of the same words are the same steps."""
    words = {name: tuple(plan.words.items()) for name, plan in plans.items()}
    different = {words[name]: plan for name, plan in plans.items()}
    steps: dict[Any, list[float]] = {key: [] for key in different}
    for key in in_turn(different, TURNS):
        with applied(different[key], workload, batch):
            steps[key].append(timed_ms(partial(take_step, workload, batch))[0])
    for name in plans:
        report(name, "step_ms", "ms", steps[words[name]])


def peak_of(meter: Any, step: Callable[[], None], steps: int = 1) -> int:
    """Return the peak of some steps, the first of them included."""
    gc.collect()
    with meter.watching():
        meter.settle()
        meter.reset_peak()
        for _ in range(steps):
            step()
        meter.settle()
        return int(meter.peak_bytes())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "llama")
