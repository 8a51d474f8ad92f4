"""Is what vramx says of memory what a GPU has: sums, predictions, remedies, and what seeing costs.

Four groups, which --only selects; each case is a process (benchmarks/programs/_seeing_*.py).
    sums      first steps of six models, recorded under torch's allocator and under vramx: the
              categories at the peak are torch's own bytes to the byte, requested and in blocks, and
              what is held and outside of torch is what the GPU has in use, within 2 %
    predict   the peak of trainings as they are written and at each level, said in a process that
              sees no GPU, within 3 % of what torch counts
    confirm   programs that run out of memory in eleven ways: each remedy that vramx explain advises
              lets the program run, and holds what was said within 2 %
    overhead  a step that is recorded takes 1.03 of one that is not, where the GPU sets the pace;
              where the host does, an event costs no more than in torch's own history as torch's
              documentation starts it; steps after a recording are those of a process that has never
              recorded
A run takes about eight minutes on an H200. Bytes are measured side by side; times and what the
whole
GPU has in use alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import NamedTuple

from benchmarks.harness import Measurement, Options, Request, RowWriter
from benchmarks.programs._cases import (
    Figures,
    Findings,
    Verdict,
    chosen,
    lines_of,
    measure,
    measure_together,
)
from benchmarks.programs._launch import ALLOCATORS, PROGRAMS, Allocator, Job, Started, visible_gpus

DESCRIPTION = "recorded sums, predictions, confirmed remedies and overhead, beside torch's (GPU)"
SHARES = "preparation"

MODELS = ("llama", "llama_amp", "llama_checkpoint", "llama_int8", "resnet50", "gpt2")
SUMMED_UNDER = tuple(each for each in ALLOCATORS if each.name != "expandable")
PREDICTED = ("llama", "gpt2")
WAYS = ("eager", "amp", "checkpoint")
LEVELS = ("left", "keep", "int8", "int4", "recompute_mlp", "recompute_all")
ROWS = (*WAYS, *LEVELS)
QUICK = ("eager", "int8", "recompute_all")
QUICK_GROUPS = ("sums", "predict", "overhead")  # a remedy is confirmed by six processes in a row
KINDS = (
    *("fragmentation", "lengths", "leak", "loss_spike", "first_step", "evaluation"),
    *("growing_cache", "limit", "pool", "rank", "another_process"),
)
ALONE = ("another_process",)  # it leaves no memory to others
TIMED = ("llama_amp", "gpt2_amp", "resnet50", "small_layers")
HOST_BOUND = "small_layers"
LIMIT_S = 180.0
HELD_AT_ONCE = 6  # processes that measure what a training takes, of up to 10 GiB
NO_GPU = Allocator("none")

SIDES = ("said", "held")
DEVICE_GOAL, PREDICT_GOAL, CONFIRM_GOAL = 0.02, 0.03, 0.02
ON_GOAL, EVENT_GOAL = 1.03, 1.0
# What the same steps differ by in one process, about.
OFF_GOAL = 1.01
FEWEST_CONFIRMED = 10

Measured = tuple[Figures, bool]


class Plan(NamedTuple):
    """What a run has: the GPU, how long a process may take, and where rows go."""

    gpu: str
    limit_s: float
    is_quick: bool
    writer: RowWriter

    def job(self, script: str, *arguments: str, allocator: Allocator = ALLOCATORS[0]) -> Job:
        gpu = "" if allocator is NO_GPU else self.gpu
        path, limit_s, is_quick = PROGRAMS / script, self.limit_s, self.is_quick
        return Job(path, allocator, arguments, gpu=gpu, limit_s=limit_s, is_quick=is_quick)


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Run the chosen groups, and judge their goals.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown group.
    """
    groups = chosen(request.only or (QUICK_GROUPS if options.quick else ()), GROUPS, "group")
    gpu = visible_gpus(options.device, 1)[0]
    plan = Plan(gpu, request.limit_s or LIMIT_S, options.quick, writer)
    verdicts: list[Verdict] = []
    has_failed = False
    for group in groups:
        run, judge = GROUPS[group]
        figures, failed = run(plan)
        has_failed |= failed
        verdicts += judge(figures)
    write_verdicts(verdicts, writer)
    is_good = not has_failed and all(found.is_met for found in verdicts)
    return [*lines_of(verdicts)], is_good


# --- sums -----------------------------------------------------------------------------------------


def run_sums(plan: Plan) -> Measured:
    models = MODELS[:1] if plan.is_quick else MODELS
    jobs = {
        f"sums {model} {allocator.name}": plan.job("_seeing_sums.py", model, allocator=allocator)
        for allocator in SUMMED_UNDER
        for model in models
    }
    return measure(jobs, lambda case: Started(jobs[case]), plan.writer)


def judge_sums(figures: Figures) -> Iterator[Verdict]:
    for case in cases_of(figures, "categories_bytes"):
        for metric in ("requested_left_bytes", "allocated_left_bytes"):
            yield verdict(case, metric, value_of(figures, case, metric), "0", lambda left: not left)
        off = value_of(figures, case, "device_off")
        if off is not None:  # else nothing says what the GPU has in use
            yield within(case, "device_off", off, DEVICE_GOAL)


# --- predict --------------------------------------------------------------------------------------


def run_predict(plan: Plan) -> Measured:
    models = PREDICTED[:1] if plan.is_quick else PREDICTED
    rows = [(model, row) for model in models for row in (QUICK if plan.is_quick else ROWS)]
    script = "_seeing_predict.py"
    said = {
        f"predict {model} {row}": plan.job(script, model, row, "said", allocator=NO_GPU)
        for model, row in rows
    }
    held = {f"predict {model} {row}": plan.job(script, model, row, "held") for model, row in rows}
    cores = len(os.sched_getaffinity(0))
    return together([*parts_of(said, cores), *parts_of(held, HELD_AT_ONCE)], plan.writer)


def judge_predict(figures: Figures) -> Iterator[Verdict]:
    cases = [*cases_of(figures, "held_bytes"), *cases_of(figures, "said_bytes")]
    for case in dict.fromkeys(cases):
        for what in ("", "allocated_"):
            said, held = (value_of(figures, case, f"{each}_{what}bytes") for each in SIDES)
            off = said / held - 1 if said is not None and held else None
            yield within(case, f"predicted_{what}off", off, PREDICT_GOAL)


# --- confirm --------------------------------------------------------------------------------------


def run_confirm(plan: Plan) -> Measured:
    kinds = ("limit",) if plan.is_quick else KINDS
    jobs = {f"confirm {kind}": plan.job("_seeing_confirm.py", kind) for kind in kinds}
    alone = {case: jobs.pop(case) for kind in ALONE if (case := f"confirm {kind}") in jobs}
    figures, has_failed = together([jobs, alone], plan.writer)
    # Not those that told of remedies: a kind that fails is none that is confirmed.
    figures["confirm", "kinds_asked"] = [len(kinds)]
    return figures, has_failed


def judge_confirm(figures: Figures) -> Iterator[Verdict]:
    confirmed = 0
    for case in cases_of(figures, "remedies"):
        found = [
            within(case, metric, values[0], CONFIRM_GOAL)
            for (name, metric), values in figures.items()
            if name == case and metric.endswith("_off")
        ]
        yield from found
        remedies = value_of(figures, case, "remedies") or 0
        confirmed += bool(remedies) and len(found) == remedies and all(f.is_met for f in found)
    asked = value_of(figures, "confirm", "kinds_asked")
    least = FEWEST_CONFIRMED if asked is None else min(FEWEST_CONFIRMED, asked)
    yield verdict("confirm", "kinds_confirmed", confirmed, f">= {least}", lambda n: n >= least)


# --- overhead -------------------------------------------------------------------------------------


def run_overhead(plan: Plan) -> Measured:
    names = TIMED[:1] if plan.is_quick else TIMED
    jobs = {f"overhead {name}": plan.job("_seeing_overhead.py", name) for name in names}
    return measure(jobs, lambda case: Started(jobs[case]), plan.writer)


def judge_overhead(figures: Figures) -> Iterator[Verdict]:
    for case in cases_of(figures, "off_ms"):
        never, off, on = (figures.get((case, f"{way}_ms"), []) for way in ("never", "off", "on"))
        left = value_of(figures, case, "hooks_left")
        yield verdict(case, "hooks_left", left, "0", lambda count: not count)
        if case.endswith(HOST_BOUND):
            torchs = added(figures, case, "history")
            yield at_most(
                case, "event_of_torchs", of(added(figures, case, "on"), torchs), EVENT_GOAL
            )
            # What categories cost, beside the stacks alone; it has no goal.
            stacks = of(added(figures, case, "on"), added(figures, case, "history_python"))
            yield verdict(case, "event_of_stacks", stacks, "", lambda _: True)
        else:
            ratio = median(a / b for a, b in zip(on, off, strict=True)) if on else None
            yield at_most(case, "on_of_off", ratio, ON_GOAL)
            after = median(off) / median(never) if off and never else None
            yield at_most(case, "off_of_never", after, OFF_GOAL)


def added(figures: Figures, case: str, way: str) -> float | None:
    """Return how many milliseconds a step takes longer than with nothing recorded.

    A busy host's speed changes from a second to the next, by more than recording adds: what counts
    is the difference within a round, whose ways follow each other, and of the rounds the median.
    """
    with_it, without = (figures.get((case, f"{each}_ms"), []) for each in (way, "off"))
    if not (with_it and without):
        return None
    return median(a - b for a, b in zip(with_it, without, strict=True))


def of(share: float | None, whole: float | None) -> float | None:
    return share / whole if share is not None and whole else None


# --- what groups share ----------------------------------------------------------------------------


def together(parts: Iterable[dict[str, Job]], writer: RowWriter) -> Measured:
    """Run the processes of each part at once, and one part after the other."""
    figures: Figures = {}
    has_failed = False
    for jobs in parts:
        found, failed = measure_together(list(jobs), jobs.__getitem__, writer)
        figures |= found
        has_failed |= failed
    return figures, has_failed


def parts_of(jobs: dict[str, Job], most: int) -> list[dict[str, Job]]:
    """Split what is to run into parts of so many."""
    items = list(jobs.items())
    return [dict(items[first : first + most]) for first in range(0, len(items), most)]


def cases_of(figures: Figures, metric: str) -> list[str]:
    return [case for case, name in figures if name == metric]


def value_of(figures: Figures, case: str, metric: str) -> float | None:
    values = figures.get((case, metric))
    return median(values) if values else None


def verdict(
    case: str, metric: str, value: float | None, goal: str, is_good: Callable[[float], bool]
) -> Verdict:
    return Verdict(case, metric, value, goal, value is not None and is_good(value))


def within(case: str, metric: str, value: float | None, most: float) -> Verdict:
    return verdict(case, metric, value, f"within {most:.0%}", lambda off: abs(off) <= most)


def at_most(case: str, metric: str, value: float | None, most: float) -> Verdict:
    return verdict(case, metric, value, f"<= {most}", lambda ratio: ratio <= most)


GROUPS: dict[str, tuple[Callable[[Plan], Measured], Callable[[Figures], Iterator[Verdict]]]] = {
    "sums": (run_sums, judge_sums),
    "predict": (run_predict, judge_predict),
    "confirm": (run_confirm, judge_confirm),
    "overhead": (run_overhead, judge_overhead),
}
# Figures that follow from several rows, and are rows of their own.
DERIVED = (
    *("predicted_off", "predicted_allocated_off", "kinds_confirmed"),
    *("event_of_torchs", "event_of_stacks", "on_of_off", "off_of_never"),
)


def write_verdicts(verdicts: Iterable[Verdict], writer: RowWriter) -> None:
    """Write each derived figure that is known as a row."""
    for case, metric, value, *_ in verdicts:
        if value is not None and metric in DERIVED:
            writer.write(case, [Measurement(metric, "1", [value])])
