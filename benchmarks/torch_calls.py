"""What one allocate or free costs through torch's own interface, by allocator.

Recorded programs are replayed through the C++ interface of the installed torch, in two ways: raw,
as code that keeps pointers does, and tensor, as a tensor does with its DataPtr; and torch.empty is
called in a Python loop. Each allocator has its own process, and they take several turns with each
case, of which the fastest counts: beside another machine's work on its core, which comes and goes,
a call takes up to 1.8 times as long. None holds memory between its turns. Nothing runs on the GPU.
Needs a GPU and a C++ compiler.

The goals, in what the native allocator takes: 0.25 for a raw call of a program of one stream and
0.35 for a tensor's, 0.6 for those of a program of several, or of one beside streams that are idle.
After a graph was captured, and beside a MemPool, a call takes no more than 1.05 of what it takes at
the same time in a process that has neither, the control.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import ROOT, Measurement, Options, Request, RowWriter
from benchmarks.programs import _cases
from benchmarks.programs._cases import Findings
from benchmarks.programs._launch import (
    ALLOCATORS,
    PROGRAMS,
    Allocator,
    Job,
    Outcome,
    Started,
    Together,
    in_turn,
    visible_gpus,
)
from benchmarks.traces import few_of, trace_files
from vramx.errors import VramxError

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "one allocate or free through torch's interface, by allocator (GPU)"

SOURCE = Path(__file__).resolve().parent / "torch_calls.cpp"
CHILD = PROGRAMS / "_calls.py"
OURS = "vramx"
CONTROL = "control"
PASSES = 22  # the first sixteen are not counted
TURNS, QUICK_TURNS = 3, 2
LIMIT_S = 300.0
# The most that a call may take, in native's, by how its case's name ends (programs/_calls.py); a
# loop in Python has no goal, for most of its time is the interpreter's.
GOALS = {" raw": 0.25, " tensor": 0.35, " streams": 0.6}
# And in the control's.
GOALS_CONTROL = {" after a graph": 1.05, " beside a pool": 1.05}
# Nanoseconds by case and process: of the fastest turn of each round.
Times = dict[tuple[str, str], list[float]]


class Kind(NamedTuple):
    """A process of each round."""

    name: str
    allocator: Allocator


KINDS = (*(Kind(each.name, each) for each in ALLOCATORS), Kind(CONTROL, ALLOCATORS[-1]))


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Measure every trace under every allocator.

    Returns:
        What to show, and whether every process ran and every goal was met.

    Raises:
        UnavailableError: there is no GPU, or no trace.
        VramxError: a trace is unknown, or the C++ source cannot be compiled here.
    """
    traces = chosen(trace_files(options), request.only)
    if options.quick and not request.only:
        traces = few_of(traces)
    gpu = visible_gpus(options.device, 1)[0]
    passes = 18 if options.quick else PASSES
    turns = QUICK_TURNS if options.quick else TURNS
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))

        def launch(kinds: Sequence[Kind]) -> list[Outcome]:
            how, paths = (str(library), str(passes), str(turns)), list(map(str, traces.values()))
            arguments = [(*how, kind.name, *paths) for kind in kinds]
            limit_s = request.limit_s or LIMIT_S
            jobs = [
                Job(CHILD, kind.allocator, each, gpu, limit_s, has_steps=True)
                for kind, each in zip(kinds, arguments, strict=True)
            ]
            together = Together([Started(job) for job in jobs])
            return together.take_turns([None] * len(jobs), threading.Event())

        times, has_failed = measure_in_turn(request.repeats or 1, launch, writer)
    write_ratios(times, writer)
    return [table(times)], not has_failed and all(each.is_met is not False for each in goals(times))


def chosen(found: Mapping[str, Path], names: Sequence[str]) -> dict[str, Path]:
    """Return the traces of these names, or all.

    Raises:
        InvalidValueError: a name is unknown.
    """
    return {name: found[name] for name in _cases.chosen(names, found, "trace")}


def compile_library(folder: Path) -> Path:
    """Compile the replay for the installed torch, with the flags that the shim is compiled with.

    Raises:
        VramxError: it does not compile here; the text has the compiler's last lines.
    """
    from vramx.allocator import toolchain
    from vramx.allocator.torch_facts import find_torch
    from vramx.config import config

    torch = find_torch()
    headers = toolchain.find_cuda_headers(torch, config())
    target = folder / "torch_calls.so"
    command = [
        *toolchain.find_compiler(config()).command,
        *toolchain.compile_flags(torch, ROOT / "csrc", headers),
        *(str(SOURCE), "-o", str(target)),
        *toolchain.link_flags(torch),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = " ".join(done.stderr.split("\n")[-12:])
        raise VramxError(f"{SOURCE.name} does not compile: {last}")
    return target


def measure_in_turn(
    rounds: int,
    launch: Callable[[Sequence[Kind]], list[Outcome]],
    writer: RowWriter,
    kinds: Sequence[Kind] = KINDS,
) -> tuple[Times, bool]:
    """Run a process of each kind and round; return the times, and whether one failed."""
    times: Times = {}
    has_failed = False
    for round_index in range(rounds):
        order = in_turn(kinds, round_index)
        for kind, outcome in zip(order, launch(order), strict=True):
            who = f"{kind.name} {round_index + 1}"
            if not outcome.is_ok:
                has_failed = True
                writer.write(f"all {who}", [], outcome.status)
            for case, ns in fastest_turns(outcome, kind.allocator).items():
                writer.write(f"{case} {who}", [Measurement("ns", "ns", ns)])
                times.setdefault((case, kind.name), []).append(statistics.median(ns))
    return times, has_failed


def fastest_turns(outcome: Outcome, allocator: Allocator) -> dict[str, list[float]]:
    """Return the passes of the fastest turn of each case; also of a process that failed later."""
    found: dict[str, list[float]] = {}
    for report in outcome.reports:
        if report["allocator"] != allocator.name:
            continue
        turns = [report["ns"], *filter(None, [found.get(report["case"])])]
        found[report["case"]] = min(turns, key=statistics.median)
    return found


def least(times: Times) -> dict[str, dict[str, float]]:
    """Return, for each case, what a call takes in the fastest turn by process."""
    found: dict[str, dict[str, float]] = {}
    for (case, kind), values in times.items():
        found.setdefault(case, {})[kind] = min(values)
    return found


class Verdict(NamedTuple):
    """What a call takes under vramx, and in what another did; no goal: nothing is asked of it."""

    case: str
    ns: float
    to_native: float | None
    to_control: float | None
    is_met: bool | None


def goals(times: Times) -> Iterator[Verdict]:
    """Judge each case that vramx ran; one whose other half was not measured is not met."""
    for case, found in least(times).items():
        if OURS not in found:
            continue
        ours = found[OURS]
        to_native = ours / found["native"] if "native" in found else None
        to_control, is_met = None, None
        for end, most in GOALS.items():
            if case.endswith(end):
                is_met = to_native is not None and to_native <= most
        for end, most in GOALS_CONTROL.items():
            if case.endswith(end):
                to_control = ours / found[CONTROL] if CONTROL in found else None
                is_met = to_control is not None and to_control <= most
        yield Verdict(case, ours, to_native, to_control, is_met)


def write_ratios(times: Times, writer: RowWriter) -> None:
    """Write what compares two figures as rows of their own."""
    for verdict in goals(times):
        ratios = {"ratio_to_native": verdict.to_native, "ratio_to_control": verdict.to_control}
        found = [
            Measurement(name, "1", [each]) for name, each in ratios.items() if each is not None
        ]
        if found:
            writer.write(f"{verdict.case} {OURS}", found)


def table(times: Times) -> Table:
    """Lay the times out, one line a case."""
    from vramx.cli import common

    names = [kind.name for kind in KINDS]
    rows = []
    judged = {verdict.case: verdict for verdict in goals(times)}
    for case, found in least(times).items():
        verdict = judged.get(case, Verdict(case, 0.0, None, None, False))
        lacking = {CONTROL: ""}
        figures = [
            f"{found[name]:.1f}" if name in found else lacking.get(name, "failed") for name in names
        ]
        ratios = [
            "" if ratio is None else f"{ratio:.3f}"
            for ratio in (verdict.to_native, verdict.to_control)
        ]
        mark = {True: "ok", False: "MISSED", None: ""}[verdict.is_met]
        rows.append([case, *figures, *ratios, mark])
    columns = ["case", *(f">{name}" for name in (*names, "/ native", "/ control")), "goal"]
    return common.table(columns, rows, title="ns a call")
