"""Runs one program in a process of its own under one of three allocators, and reads its report.

The program is the same file each time; what differs is the command before it and the environment.
Several are started at a time and import beside each other; when all of them wait for their turns
(see `_turn`), each has the GPU until it ends, or some share the GPU and take their steps in turn.
One that fails, is killed or hangs is an outcome with the reason, never an exception. Callable from
several threads; the last turn ends with the process, which `stop` brings about early.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from benchmarks.harness import UnavailableError
from benchmarks.programs import _turn
from vramx.errors import InvalidValueError
from vramx.memory.replay import load_core

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(__file__).resolve().parent
Item = TypeVar("Item")
BATCH = 9  # processes that import at once
_POLL_S = 0.05
_OUT_OF_MEMORY = ("CUDA out of memory.", "torch.OutOfMemoryError")
# Settings of one allocator must not reach a run of another.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "VRAMX")
OUT_OF_MEMORY = "failed: out of memory"


@dataclass(frozen=True)
class Allocator:
    """How a Python program is started under an allocator."""

    name: str  # as the program's report must name it
    prefix: tuple[str, ...] = ()  # between the interpreter and the program
    environment: tuple[tuple[str, str], ...] = ()


_EXPANDABLE = "expandable_segments:True"
ALLOCATORS = (
    Allocator("native"),
    Allocator(
        "expandable",
        # torch 2.9 renamed the variable; the versions before know the second only.
        environment=(
            ("PYTORCH_ALLOC_CONF", _EXPANDABLE),
            ("PYTORCH_CUDA_ALLOC_CONF", _EXPANDABLE),
        ),
    ),
    Allocator("vramx", prefix=("-m", "vramx", "run")),
)


def in_turn(items: Sequence[Item], repeat: int) -> list[Item]:
    """Return the order of one round: every other round backwards, so that drift favours none."""
    return list(items if repeat % 2 == 0 else reversed(items))


def visible_gpus(first: int, count: int) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES must say for each of `count` GPUs, from `first` on.

    Raises:
        UnavailableError: this machine has no GPU.
        InvalidValueError: it has fewer.
    """
    found = len(load_core().probe_cuda()["devices"])
    if not found:
        raise UnavailableError("it needs a GPU")
    inherited = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = (inherited or [str(index) for index in range(found)])[:found]
    if first + count > len(names):
        asked = f"GPUs {first} to {first + count - 1} were asked for"
        raise InvalidValueError(f"{asked}; accepted are 0 to {len(names) - 1}")
    return names[first : first + count]


@dataclass(frozen=True)
class Job:
    """One process to run."""

    script: Path
    allocator: Allocator
    arguments: tuple[str, ...] = ()
    gpu: str | None = None  # for CUDA_VISIBLE_DEVICES; as the environment has it if None
    limit_s: float = 180.0  # of its turns
    has_steps: bool = False  # it has a turn for each step
    is_quick: bool = False  # it takes fewer steps, unless the environment names another size


@dataclass(frozen=True)
class Outcome:
    """What became of a process: the reports that it printed, and "ok" or the reason."""

    status: str
    reports: tuple[dict[str, Any], ...]
    wall_s: float  # without the time that it waited for its turn

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


class Started:
    """A process that has begun to import and waits for its turn.

    `wait_until_ready`, as often as one likes; `begin`; then, as long as `comes_to_turn`,
    `take_step`; then `finish`, once. Or `take_turn`, which is all of it. Or `cancel`, at any time.
    In the end the process has ended.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._left_s = job.limit_s
        self._start_s = time.monotonic()
        # Files, not pipes: a grandchild that outlives the program would keep a pipe open.
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by _close
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._turns, theirs = os.pipe()
        inherited = environment(job, os.environ) | {_turn.TURN: str(theirs)}
        if job.has_steps:
            inherited[_turn.STEPS] = "1"
        self._process = subprocess.Popen(
            [sys.executable, *job.allocator.prefix, str(job.script), *job.arguments],
            cwd=ROOT,
            env=inherited,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
            pass_fds=[theirs],
        )
        os.close(theirs)
        self._is_ready = False
        self._has_ended = False
        self._end_s: float | None = None

    def take_turn(
        self, cap_bytes: int | None = None, stop: threading.Event | None = None
    ) -> Outcome:
        """Let the program begin and wait for its end, its time-out, or until `stop` is set."""
        stop = stop or threading.Event()
        try:
            self.wait_until_ready(stop)
            self.begin(cap_bytes)
            while self.comes_to_turn(stop):
                self.take_step()
        except BaseException:
            self.cancel()
            raise
        return self.finish()

    def wait_until_ready(self, stop: threading.Event) -> None:
        """Wait until the program has imported and waits for its turn, or has ended, or has to."""
        if not self._is_ready:
            self.comes_to_turn(stop)
            self._is_ready = True

    def begin(self, cap_bytes: int | None) -> None:
        self._left_s = self._job.limit_s
        _turn.give(self._process, cap_bytes)

    def take_step(self) -> None:
        _turn.give_step(self._process)

    def comes_to_turn(self, stop: threading.Event) -> bool:
        """Wait until the program waits for a turn; say whether it does, or has ended, or had to."""
        if self._end_s is not None:
            return False
        start_s, comes = time.monotonic(), False
        while not comes and not stop.is_set():
            self._has_ended = self._process.poll() is not None
            if self._has_ended or time.monotonic() - start_s > self._left_s:
                break
            if select.select([self._turns], [], [], _POLL_S)[0]:
                comes = bool(os.read(self._turns, 1))
                if not comes:
                    stop.wait(_POLL_S)  # the other end is closed: the program is about to end
        self._left_s -= time.monotonic() - start_s
        if not comes:
            # With its workers, which would hold the GPU's memory in the turns to come.
            _end(self._process)
            self._end_s = time.monotonic()
        return comes

    def finish(self) -> Outcome:
        """Return what became of the process."""
        assert self._end_s is not None
        try:
            reports = _reports(self._output)
            waited_s = sum(report.get("waited_s", 0.0) for report in reports[-1:])
            wall_s = self._end_s - self._start_s - waited_s
            if not self._has_ended:
                limit_s = self._job.limit_s
                return Outcome(f"failed: no result after {limit_s:.0f} s", reports, wall_s)
            status = _status(self._process.returncode, _text(self._errors), reports, self._job)
            return Outcome(status, reports, wall_s)
        finally:
            self._close()

    def cancel(self) -> None:
        """End the process, whether it has had a turn or not."""
        if self._end_s is None:  # by now its number may be another's
            _end(self._process)
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            self._process.stdin.close()
        if not self._output.closed:
            os.close(self._turns)
        self._output.close()
        self._errors.close()


class Together:
    """Processes that share a GPU and take their steps in turn.

    Whatever makes the machine slower or faster for a while then does so for all of them. Each is
    first as often as the others, and none takes two steps in a row while there are three.
    """

    def __init__(self, processes: Sequence[Started]) -> None:
        self._processes = processes

    def wait_until_ready(self, stop: threading.Event) -> None:
        for process in self._processes:
            process.wait_until_ready(stop)

    def take_turns(self, caps: Sequence[int | None], stop: threading.Event) -> list[Outcome]:
        """Run them to their ends, each with its cap; return what became of each."""
        try:
            self.wait_until_ready(stop)
            stepping = []
            for process, cap_bytes in zip(self._processes, caps, strict=True):
                process.begin(cap_bytes)
                if process.comes_to_turn(stop):
                    stepping.append(process)
            while stepping:
                for process in list(stepping):
                    process.take_step()
                    if not process.comes_to_turn(stop):
                        stepping.remove(process)
                stepping = [*stepping[1:], *stepping[:1]]
        except BaseException:
            self.cancel()
            raise
        return [process.finish() for process in self._processes]

    def cancel(self) -> None:
        for process in self._processes:
            process.cancel()


Process = TypeVar("Process", Started, Together)


def in_batches(
    items: Iterable[Item],
    start: Callable[[Item], Process],
    stop: threading.Event,
    batch: int = BATCH,
) -> Generator[tuple[Item, Process], None, None]:
    """Yield each item and its process, ready for its turn; when closed, end the rest.

    So many import at once. None does while another has its turn: it would slow the host, for some
    steps of what is measured and not for others.
    """
    remaining = iter(items)
    waiting: deque[tuple[Item, Process]] = deque()
    try:
        while True:
            for item in islice(remaining, batch):
                waiting.append((item, start(item)))
            if not waiting:
                return
            for _, process in waiting:
                process.wait_until_ready(stop)
            while waiting:
                yield waiting.popleft()
    finally:
        for _, process in waiting:
            process.cancel()


def run(job: Job, stop: threading.Event | None = None) -> Outcome:
    """Run a process whose turn it is at once."""
    return Started(job).take_turn(stop=stop)


def environment(job: Job, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's process."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _ALLOCATOR_VARIABLES and not name.startswith("VRAMX_")
    }
    if "VRAMX_CACHE_DIR" in inherited:  # where things are kept, not how memory is handled
        kept["VRAMX_CACHE_DIR"] = inherited["VRAMX_CACHE_DIR"]
    path = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    # With another workspace cuBLAS may add up in another order each time.
    kept |= {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    kept |= dict(job.allocator.environment)
    if job.gpu is not None:
        kept["CUDA_VISIBLE_DEVICES"] = job.gpu
    if job.is_quick:
        kept.setdefault("PROGRAM_SIZE", "quick")
    return kept


def _end(process: subprocess.Popen[bytes]) -> None:
    # The program's workers share its group, and would hold the GPU's memory in the next run.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _reports(output: IO[str]) -> tuple[dict[str, Any], ...]:
    found = []
    for line in _text(output).splitlines():
        try:
            value = json.loads(line) if line.startswith("{") else None
        except ValueError:  # something else that begins with a brace
            continue
        if isinstance(value, dict):
            found.append(value)
    return tuple(found)


def _status(code: int, errors: str, reports: Sequence[dict[str, Any]], job: Job) -> str:
    if code < 0:
        return f"failed: killed by {signal.Signals(-code).name}"
    if code:
        if any(text in errors for text in _OUT_OF_MEMORY):
            return OUT_OF_MEMORY
        lines = errors.strip().splitlines() or [f"exit code {code}"]
        return f"failed: {_without_folders(lines[-1])[:200]}"
    if not reports:
        return "failed: the program printed no report"
    served_by = {report.get("allocator") for report in reports} - {job.allocator.name}
    if served_by:
        # Where vramx could not be installed, a warning says why and the program goes on without.
        said = [line for line in errors.splitlines() if job.allocator.name in line][-1:]
        reason = f": {_without_folders(said[0])[:160]}" if said else ""
        return f"failed: the allocator was {served_by.pop()}, not {job.allocator.name}{reason}"
    return "ok"


def _without_folders(text: str) -> str:
    """Leave a path's last part only: a row is published, and names no folder of this machine."""
    return re.sub(r"(?:/[\w.+~-]+)+/", "", text)
