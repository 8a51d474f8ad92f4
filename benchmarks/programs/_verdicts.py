"""What the runs of a program say about vramx: each goal with its value, and whether it is met.

Pure functions of finished runs. A goal that cannot be judged, because a run that it needs is
missing or because torch itself does not repeat, has no value and a word that says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from benchmarks.programs._launch import OUT_OF_MEMORY, Outcome
from vramx.sizes import MIB

if TYPE_CHECKING:
    from rich.table import Table

STEP_LIMIT = 1.01  # of the faster of torch's two allocators
CAPPED_STEP_LIMIT = 1.05  # of vramx without a cap
RESERVED_LIMIT = 1.01  # of the peak of allocated bytes,
RESERVED_SLACK_BYTES = 32 * MIB  # and what small programs may round up to
CAP = 1.03  # of the peak of allocated bytes of the native run


@dataclass(frozen=True)
class Program:
    """A file of this folder, and what is expected of it."""

    name: str
    has_fixed_shapes: bool = False  # so that no driver call may be left after the warm-up
    compiles: bool = False  # its first run fills a cache on disk, and is not kept
    cap_bytes: int | None = None  # of every run, for a program that must run out of memory
    shares_gpu: bool = True  # its processes, so that they take their steps in turn


@dataclass(frozen=True)
class Run:
    """One process of a program."""

    program: Program
    allocator: str
    is_capped: bool
    outcome: Outcome
    round: int = 0  # of processes that are compared

    @property
    def report(self) -> dict[str, Any]:
        return self.outcome.reports[-1]

    @property
    def timed_ms(self) -> list[float]:
        return list(self.report["step_ms"][self.report["warmup"] :])


@dataclass(frozen=True)
class Verdict:
    """A goal: its value, and whether that is good enough (None: nothing was promised or known)."""

    metric: str
    value: float | None
    is_met: bool | None
    why: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return self.why
        mark = {True: " ok", False: " MISSED", None: ""}[self.is_met]
        return f"{self.value:.4g}{mark}"


def judge(program: Program, runs: Sequence[Run]) -> list[Verdict]:
    """Judge a program by its runs, in the order of the table's columns."""
    good = [run for run in runs if run.outcome.is_ok]
    return [
        _losses(good),
        _reserved(good),
        _step(good),
        _driver_calls(program, good),
        _capped_step(program, runs, good),
    ]


def median_ms(runs: Sequence[Run], allocator: str, is_capped: bool = False) -> float | None:
    """Return the median of all timed steps of an allocator's runs."""
    steps = [ms for run in _of(runs, allocator, is_capped) for ms in run.timed_ms]
    return statistics.median(steps) if steps else None


def _of(runs: Sequence[Run], allocator: str, is_capped: bool = False) -> list[Run]:
    return [run for run in runs if run.allocator == allocator and run.is_capped == is_capped]


def _losses(good: Sequence[Run]) -> Verdict:
    """Count the losses that are not native's, bit for bit, of all of vramx's runs.

    Where some are not, one run of native does not tell whether it would repeat itself.
    """
    native = [run.report["losses"] for run in _of(good, "native")]
    ours = [run.report["losses"] for run in good if run.allocator == "vramx"]
    metric = "loss_mismatches"
    if not native or not ours:
        return Verdict(metric, None, None, "not compared")
    if any(losses != native[0] for losses in native):
        return Verdict(metric, None, None, "native differs too")
    wrong = sum(a != b for losses in ours for a, b in zip_longest(native[0], losses))
    if wrong and len(native) == 1:
        return Verdict(metric, None, None, "differ; native ran once")
    return Verdict(metric, wrong, wrong == 0)


def _reserved(good: Sequence[Run]) -> Verdict:
    reports = [run.report for run in _of(good, "vramx")]
    metric = "peak_reserved_ratio"
    if not reports or not all(report["peak_allocated_bytes"] for report in reports):
        return Verdict(metric, None, None, "no run")
    is_met = all(
        report["peak_reserved_bytes"]
        <= RESERVED_LIMIT * report["peak_allocated_bytes"] + RESERVED_SLACK_BYTES
        for report in reports
    )
    return Verdict(metric, max(reserved_ratio(report) for report in reports), is_met)


def reserved_ratio(report: dict[str, Any]) -> float:
    """Return what was reserved at the peak, for each byte allocated at its peak."""
    return float(report["peak_reserved_bytes"] / report["peak_allocated_bytes"])


def _beside(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Return the runs in the rounds of some others."""
    rounds = {run.round for run in others}
    return [run for run in runs if run.round in rounds]


def _step(good: Sequence[Run]) -> Verdict:
    names = ("native", "expandable")
    ours = median_ms(_beside(good, [run for name in names for run in _of(good, name)]), "vramx")
    torchs = [median_ms(good, name) for name in names]
    known = [ms for ms in torchs if ms is not None]
    if ours is None or not known:
        return Verdict("step_ratio", None, None, "no run")
    ratio = ours / min(known)
    return Verdict("step_ratio", ratio, ratio <= STEP_LIMIT)


def _driver_calls(program: Program, good: Sequence[Run]) -> Verdict:
    metric = "driver_calls_per_step"
    reports = [run.report for run in _of(good, "vramx")]
    calls = [n for report in reports for n in (report["driver_calls"] or [])[report["warmup"] :]]
    if not calls:
        return Verdict(metric, None, None, "no run")
    mean = statistics.fmean(calls)
    return Verdict(metric, mean, mean == 0 if program.has_fixed_shapes else None)


def _capped_step(program: Program, runs: Sequence[Run], good: Sequence[Run]) -> Verdict:
    metric = "capped_step_ratio"
    if program.cap_bytes is not None:
        return Verdict(metric, None, None, "has its own cap")
    beside = _beside(good, _of(good, "vramx", is_capped=True))
    capped, free = median_ms(good, "vramx", is_capped=True), median_ms(beside, "vramx")
    if capped is not None and free is not None:
        return Verdict(metric, capped / free, capped / free <= CAPPED_STEP_LIMIT)
    failed = _of(runs, "vramx", is_capped=True)
    return Verdict(metric, None, False if failed else None, failure(failed) or "no run")


def failure(runs: Sequence[Run]) -> str:
    """Return in a few words why the last of the runs failed, or nothing."""
    bad = [run.outcome.status for run in runs if not run.outcome.is_ok]
    return "" if not bad else "OOM" if bad[-1] == OUT_OF_MEMORY else bad[-1][:40]


def peer_under_cap(runs: Sequence[Run], allocator: str) -> str:
    """Say how one of torch's allocators did under the cap: its slowdown and retries, or why not."""
    capped = _of(runs, allocator, is_capped=True)
    if reason := failure(capped):
        return reason
    good = [run for run in runs if run.outcome.is_ok]
    with_cap, free = median_ms(good, allocator, is_capped=True), median_ms(good, allocator)
    if with_cap is None or free is None:
        return ""
    retries = max(run.report["alloc_retries"] for run in capped)
    return f"{with_cap / free:.2f}x, {retries} retries"


def peer_reserved(runs: Sequence[Run], allocator: str) -> str:
    """Return one of torch's allocators' reserved ratio, or why there is none."""
    chosen = _of(runs, allocator)
    reports = [run.report for run in chosen if run.outcome.is_ok]
    ratios = [reserved_ratio(report) for report in reports if report["peak_allocated_bytes"]]
    return f"{max(ratios):.3f}" if ratios else failure(chosen)


def is_good(program: Program, runs: Sequence[Run]) -> bool:
    """Say whether vramx ran every time and met every goal; torch's own failures are its own."""
    ours = [run for run in runs if run.allocator == "vramx"]
    ran = bool(ours) and all(run.outcome.is_ok for run in ours)
    return ran and not any(verdict.is_met is False for verdict in judge(program, runs))


def tables(runs: Sequence[Run]) -> list[Table]:
    """Lay out the goals, and beside them what torch's own allocators did; one line a program."""
    from vramx.cli import common

    goals, peers = [], []
    for program in dict.fromkeys(run.program for run in runs):
        own = [run for run in runs if run.program == program]
        goals.append([program.name, *map(str, judge(program, own))])
        peers.append([program.name])
        for name in ("native", "expandable"):
            peers[-1] += [peer_reserved(own, name), peer_under_cap(own, name)]
    capped = f"step at {CAP} x peak"
    said = ("losses differ", "reserved / allocated", "step / best", "driver calls a step")
    about = "unmodified programs under vramx, against the faster of torch's allocators"
    theirs = "torch's allocators on the same programs"
    of_peers = ("native: reserved", capped, "expandable: reserved", capped)
    return [
        common.table(("!program", *said, capped), goals, title=about),
        common.table(("!program", *of_peers), peers, title=theirs),
    ]
