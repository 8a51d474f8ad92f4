"""Runs one program in a process of its own under one of three allocators, and reads its report.

The program is the same file each time; what differs is the command before it and the environment.
A process that fails, is killed or hangs is an outcome with the reason, never an exception. Callable
from several threads; each call waits for its process, which is stopped when `stop` is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import UnavailableError
from vramx.errors import InvalidValueError
from vramx.memory.replay import load_core

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(__file__).resolve().parent
_POLL_S = 0.2
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


def in_turn(allocators: Sequence[Allocator], repeat: int) -> list[Allocator]:
    """Return the order of one round: every other round backwards, so that drift favours none."""
    return list(allocators if repeat % 2 == 0 else reversed(allocators))


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
    cap_bytes: int | None = None
    limit_s: float = 180.0


@dataclass(frozen=True)
class Outcome:
    """What became of a process: the reports that it printed, and "ok" or the reason."""

    status: str
    reports: tuple[dict[str, Any], ...]
    wall_s: float

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


def run(job: Job, stop: threading.Event | None = None) -> Outcome:
    """Run a process to its end, its time-out, or until `stop` is set."""
    start_s = time.monotonic()
    # Files, not pipes: a grandchild that outlives the program would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *job.allocator.prefix, str(job.script), *job.arguments],
            cwd=ROOT,
            env=environment(job, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        ended = _wait(process, start_s + job.limit_s, stop or threading.Event())
        wall_s = time.monotonic() - start_s
        reports = _reports(output)
        if not ended:
            return Outcome(f"failed: no result after {job.limit_s:.0f} s", reports, wall_s)
        return Outcome(_status(process.returncode, _text(errors), reports, job), reports, wall_s)


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
    kept |= {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    kept |= dict(job.allocator.environment)
    if job.gpu is not None:
        kept["CUDA_VISIBLE_DEVICES"] = job.gpu
    kept.pop("PROGRAM_CAP_BYTES", None)
    if job.cap_bytes is not None:
        kept["PROGRAM_CAP_BYTES"] = str(job.cap_bytes)
    return kept


def _wait(process: subprocess.Popen[bytes], deadline_s: float, stop: threading.Event) -> bool:
    """Say whether the process ended by itself; it and its children have ended in any case."""
    try:
        while process.poll() is None:
            if time.monotonic() > deadline_s or stop.wait(_POLL_S):
                return False
        return True
    finally:
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
