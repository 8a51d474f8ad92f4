"""Unmodified training programs under torch's native allocator, expandable_segments and vramx.

Each program of benchmarks/programs runs in processes of its own, the three allocators in turn on
one GPU; then once more each under a cap of 1.03 times its own peak of allocated bytes. A row is
written as soon as a process has ended. The goals: the same losses bit for bit, reserved memory
within 1 % (and 32 MiB) of allocated, a median step within 1 % of torch's faster allocator, no
driver call a step once fixed shapes have settled, and a capped step within 5 % of an uncapped one.
A program takes two to three minutes; --jobs runs as many programs at once, each on its own GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks.harness import Measurement, Options
from benchmarks.programs import _launch, _verdicts
from benchmarks.programs._launch import (
    ALLOCATORS,
    PROGRAMS,
    Allocator,
    Job,
    in_turn,
    visible_gpus,
)
from benchmarks.programs._rows import Request, RowWriter
from benchmarks.programs._verdicts import CAP, Program, Run, judge
from vramx.errors import InvalidValueError
from vramx.sizes import GIB

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "whole training programs, unmodified, under native, expandable and vramx (GPU)"

CATALOGUE = (
    Program("llama_fixed", has_fixed_shapes=True),
    Program("llama_varlen"),
    Program("llama_checkpoint"),
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
QUICK = ("llama_fixed", "llama_varlen")
REPEATS = 2
LIMIT_S = 180.0


def run_all(
    options: Options, request: Request, writer: RowWriter
) -> tuple[list[Table | str], bool]:
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
    lane = Lane(repeats, request.limit_s or LIMIT_S, writer)
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
    for name in names:
        if name not in known:
            raise InvalidValueError(f"program {name!r} is unknown; accepted are {', '.join(known)}")
    return [known[name] for name in names or known]


def spread(programs: Sequence[Program], gpus: Sequence[str], lane: Lane) -> list[Run]:
    """Run programs on as many GPUs at once; all runs of one program stay on one GPU."""
    idle = list(gpus)  # a worker takes one and puts it back; list operations are atomic

    def on_an_idle_gpu(program: Program) -> list[Run]:
        gpu = idle.pop()
        try:
            runs = list(lane.runs(program, gpu))
            lane.write_verdicts(program, runs)
            return runs
        finally:
            idle.append(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        futures = [pool.submit(on_an_idle_gpu, program) for program in programs]
        try:
            return [run for future in futures for run in future.result()]
        except BaseException:  # Ctrl-C too: nothing may go on running behind the prompt
            lane.stop.set()
            for future in futures:
                future.cancel()
            raise


class Lane:
    """Runs the processes of one program after the other; shared by the GPUs."""

    def __init__(
        self,
        repeats: int,
        limit_s: float,
        writer: RowWriter,
        allocators: Sequence[Allocator] = ALLOCATORS,
        launch: Callable[[Job, threading.Event], _launch.Outcome] = _launch.run,
    ) -> None:
        self._repeats = repeats
        self._limit_s = limit_s
        self._writer = writer
        self._allocators = allocators
        self._launch = launch
        self.stop = threading.Event()

    def runs(self, program: Program, gpu: str) -> Iterator[Run]:
        """Run a program without a cap, `repeats` times under each allocator, then with one."""
        if program.compiles:  # to the compiler's cache on disk, which all runs after it find
            self._take(program, self._allocators[0], gpu, program.cap_bytes)
        native_peaks = []
        for repeat in range(self._repeats):
            for allocator in in_turn(self._allocators, repeat):
                run = self._run(program, allocator, gpu, None, repeat)
                yield run
                if run.allocator == "native" and run.outcome.is_ok:
                    native_peaks.append(run.report["peak_allocated_bytes"])
                if self.stop.is_set():
                    return
            if not native_peaks:  # the program itself does not run here
                return
        if program.cap_bytes is None:
            cap_bytes = int(CAP * max(native_peaks))
            for allocator in in_turn(self._allocators, 0):
                yield self._run(program, allocator, gpu, cap_bytes, 0)
                if self.stop.is_set():
                    return

    def write_verdicts(self, program: Program, runs: Sequence[Run]) -> None:
        """Write the values of the goals, where there are any."""
        known = [found for found in judge(program, runs) if found.value is not None]
        values = [Measurement(found.metric, "1", [float(found.value or 0)]) for found in known]
        if values and not self.stop.is_set():
            self._writer.write(f"{program.name} goals", values)

    def _run(
        self, program: Program, allocator: Allocator, gpu: str, cap_bytes: int | None, repeat: int
    ) -> Run:
        outcome = self._take(program, allocator, gpu, cap_bytes or program.cap_bytes)
        run = Run(program, allocator.name, cap_bytes is not None, outcome)
        case = f"{program.name} {allocator.name} {'capped' if run.is_capped else repeat + 1}"
        if not self.stop.is_set():
            self._writer.write(case, measurements(run), outcome.status)
        return run

    def _take(
        self, program: Program, allocator: Allocator, gpu: str, cap_bytes: int | None
    ) -> _launch.Outcome:
        script = PROGRAMS / f"{program.name}.py"
        job = Job(script, allocator, gpu=gpu, cap_bytes=cap_bytes, limit_s=self._limit_s)
        return self._launch(job, self.stop)


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
