"""Unmodified training programs under torch's native allocator, expandable_segments and vramx.

Each program of benchmarks/programs runs in a process under each of the three allocators; then once
more under a cap of 1.03 times its own peak of allocated bytes, beside vramx without one. The goals:
the same losses bit for bit, reserved memory within 1 % (and 32 MiB) of allocated, a median step
within 1 % of torch's faster allocator, no driver call a step once fixed shapes have settled, and a
capped step within 5 % of an uncapped one.

The processes that are compared share a GPU, of which they need a third each, and take one step
after the other: a host that slows down for a while, as rented ones do, slows all of them. The
processes of two programs import at once, and none does while others are measured on that GPU. Rows
are written as soon as those that share the GPU have ended. --jobs uses as many GPUs at once, whose
programs then do disturb each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

from benchmarks.harness import Measurement, Options, Request, RowWriter
from benchmarks.programs import _cases, _launch, _verdicts
from benchmarks.programs._cases import Findings
from benchmarks.programs._launch import (
    ALLOCATORS,
    PROGRAMS,
    Allocator,
    Job,
    Started,
    Together,
    in_batches,
    in_turn,
    visible_gpus,
)
from benchmarks.programs._verdicts import CAP, Program, Run, judge
from vramx.sizes import GIB

DESCRIPTION = "whole training programs, unmodified, under native, expandable and vramx (GPU)"

CATALOGUE = (
    Program("llama_fixed", has_fixed_shapes=True),
    Program("llama_varlen"),
    # Native reserves 84 GiB where 23 would do.
    Program("llama_checkpoint", shares_gpu=False),
    Program("lora_varlen"),
    Program("cnn_multires"),
    Program("gnn_sampled"),
    Program("lightning_vit", has_fixed_shapes=True),
    # Its batch of 16 needs about 26 GiB and that of 32 twice as much, so that no allocator's
    # overhead decides which of them fits.
    Program("batch_size_search", has_fixed_shapes=True, cap_bytes=36 * GIB),
    Program("generate_kv"),
    Program("compile_default", has_fixed_shapes=True, compiles=True),
    Program("compile_reduce_overhead", has_fixed_shapes=True, compiles=True),
)
QUICK = ("llama_varlen",)
REPEATS = 1
BATCH = 4  # of those that share the GPU: two programs
LIMIT_S = 180.0


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Run the chosen programs.

    Returns:
        What to show, and whether vramx ran every program and met every goal.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown program, or more jobs than GPUs.
    """
    programs = chosen(request.only or (QUICK if options.quick else ()))
    gpus = visible_gpus(options.device, request.jobs)
    repeats = request.repeats or (1 if options.quick else REPEATS)
    lane = Lane(repeats, request.limit_s or LIMIT_S, writer, is_quick=options.quick)
    runs = spread(programs, gpus, lane)
    is_good = all(
        _verdicts.is_good(program, [run for run in runs if run.program == program])
        for program in programs
    )
    return [*_verdicts.tables(runs)], is_good


def chosen(names: Sequence[str]) -> list[Program]:
    """Return the programs of these names, or all.

    Raises:
        InvalidValueError: a name is unknown.
    """
    known = {program.name: program for program in CATALOGUE}
    return [known[name] for name in _cases.chosen(names, known, "program")]


def spread(programs: Sequence[Program], gpus: Sequence[str], lane: Lane) -> list[Run]:
    """Run programs on as many GPUs at once; all runs of one program stay on one GPU."""
    waiting = deque(programs)  # each GPU takes the next; popleft is atomic

    def taken() -> Iterator[Program]:
        while waiting:
            try:
                yield waiting.popleft()
            except IndexError:  # another GPU took the last
                return

    def on_gpu(gpu: str) -> list[Run]:
        return list(lane.runs(taken(), gpu))

    found = _cases.at_once(gpus, on_gpu, lane.stop)
    runs = [run for on_one in found for run in on_one]
    return sorted(runs, key=lambda run: programs.index(run.program))


@dataclass(frozen=True)
class Planned:
    """One process that is to run."""

    program: Program
    allocator: Allocator
    round: int  # of processes that are compared
    is_capped: bool = False
    is_kept: bool = True


def plan(
    program: Program, repeats: int, allocators: Sequence[Allocator]
) -> Iterator[list[Planned]]:
    """Yield those that run together: `repeats` times all allocators, then all with a cap."""

    def apart(together: list[Planned]) -> list[list[Planned]]:
        return [together] if program.shares_gpu else [[each] for each in together]

    if program.compiles:  # to the compiler's cache on disk, which all runs after it find
        yield [Planned(program, allocators[0], 0, is_kept=False)]
    for repeat in range(repeats):
        yield from apart([Planned(program, each, repeat) for each in in_turn(allocators, repeat)])
    if program.cap_bytes is None:
        free = Planned(program, allocators[-1], repeats)
        capped = [Planned(program, each, repeats, is_capped=True) for each in allocators]
        yield from apart([free, *capped])


def cap_of(planned: Planned, native_peaks: Sequence[int]) -> int | None:
    return int(CAP * max(native_peaks)) if planned.is_capped else planned.program.cap_bytes


class Lane:
    """Gives the processes of programs their turns; shared by the GPUs."""

    def __init__(
        self,
        repeats: int,
        limit_s: float,
        writer: RowWriter,
        allocators: Sequence[Allocator] = ALLOCATORS,
        launch: Callable[[Job], Started] = _launch.Started,
        *,
        is_quick: bool = False,
    ) -> None:
        self._repeats = repeats
        self._limit_s = limit_s
        self._writer = writer
        self._allocators = allocators
        self._launch = launch
        self._is_quick = is_quick
        self.stop = threading.Event()

    def runs(self, programs: Iterable[Program], gpu: str) -> Iterator[Run]:
        """Run programs on one GPU, without a cap and then with one, and write their verdicts."""

        def start(together: list[Planned]) -> Together:
            return Together([self._launch(self._job(planned, gpu)) for planned in together])

        everything = (
            together
            for program in programs
            for together in plan(program, self._repeats, self._allocators)
        )
        with closing(in_batches(everything, start, self.stop, BATCH)) as started:
            for program, turns in groupby(started, key=lambda pair: pair[0][0].program):
                runs = []
                for run in self._turns(turns):
                    runs.append(run)
                    yield run
                if self.stop.is_set():
                    return
                self.write_verdicts(program, runs)

    def _job(self, planned: Planned, gpu: str) -> Job:
        script = PROGRAMS / f"{planned.program.name}.py"
        return Job(
            script,
            planned.allocator,
            gpu=gpu,
            limit_s=self._limit_s,
            has_steps=True,
            is_quick=self._is_quick,
        )

    def _turns(self, turns: Iterable[tuple[list[Planned], Together]]) -> Iterator[Run]:
        """Run the processes of one program."""
        native_peaks: list[int] = []
        for together, processes in turns:
            if self.stop.is_set():
                processes.cancel()
                return
            if together[0].round > 0 and not native_peaks:  # the program itself does not run here
                processes.cancel()
                continue
            caps = [cap_of(planned, native_peaks) for planned in together]
            outcomes = processes.take_turns(caps, self.stop)
            for planned, outcome in zip(together, outcomes, strict=True):
                if not planned.is_kept:
                    continue
                name, is_capped = planned.allocator.name, planned.is_capped
                run = Run(planned.program, name, is_capped, outcome, planned.round)
                self._write(run)
                yield run
                if name == "native" and outcome.is_ok:
                    native_peaks.append(run.report["peak_allocated_bytes"])

    def write_verdicts(self, program: Program, runs: Sequence[Run]) -> None:
        """Write the values of the goals, where there are any."""
        known = [found for found in judge(program, runs) if found.value is not None]
        values = [Measurement(found.metric, "1", [float(found.value or 0)]) for found in known]
        if values and not self.stop.is_set():
            self._writer.write(f"{program.name} goals", values)

    def _write(self, run: Run) -> None:
        case = "capped" if run.is_capped else run.round + 1
        if not self.stop.is_set():
            name = f"{run.program.name} {run.allocator} {case}"
            self._writer.write(name, measurements(run), run.outcome.status)


def measurements(run: Run) -> list[Measurement]:
    """Return what one process measured; nothing if it failed."""
    if not run.outcome.is_ok:
        return []
    report = run.report
    calls = report["driver_calls"] or report["device_calls"]
    return [
        Measurement("step_ms", "ms", run.timed_ms),
        Measurement("peak_allocated", "B", [report["peak_allocated_bytes"]]),
        Measurement("peak_reserved", "B", [report["peak_reserved_bytes"]]),
        Measurement("alloc_retries", "1", [report["alloc_retries"]]),
        Measurement("ooms", "1", [report["ooms"]]),
        Measurement("driver_calls", "1", calls[report["warmup"] :]),
        Measurement("process_s", "s", [run.outcome.wall_s]),
        *(Measurement(name, "1", [value]) for name, value in report["extra"].items()),
    ]
