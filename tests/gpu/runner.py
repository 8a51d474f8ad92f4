"""Runs a program in a process of its own, under either allocator, and reads what it printed.

For what must not happen in the process of the tests: exits, forks, sticky CUDA errors, an
installation that comes too late. Starting a process costs some seconds, so the tests of a module
start all their programs at once, and each waits for its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
CHECKOUT = HERE.parent.parent
# For starting Python and CUDA several times, on a machine where that is slow.
TIME_LIMIT_S = 240

Key = TypeVar("Key")


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int
    stdout: str
    stderr: str

    def facts(self, code: int = 0) -> dict[str, Any]:
        """Return what the program printed last, once it is clear that it ended as it should."""
        assert self.code == code, str(self)
        lines = [line for line in self.stdout.splitlines() if line.startswith("{")]
        assert lines, str(self)
        facts: dict[str, Any] = json.loads(lines[-1])
        return facts

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.stdout[-4000:]}\n{self.stderr[-8000:]}"


def script(name: str, *arguments: str) -> list[str]:
    """Return the command that runs one of the programs beside this file."""
    return [sys.executable, str(PROGRAMS / f"{name}.py"), *arguments]


def environment(settings: Mapping[str, str], path: Path = CHECKOUT) -> dict[str, str]:
    """Return this environment without vramx's variables, with `path` as the first to import from.

    The checkout is not installed as a package, so programs that import vramx need it there.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("VRAMX")}
    paths = [str(path), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **settings}


def importable() -> Path:
    """Return a folder from which torch finds vramx as it finds an installed package."""
    from vramx.cli import entry_folder
    from vramx.config import config

    if entry_folder.finds_entry_point(sys.executable):
        return CHECKOUT
    return entry_folder.make(config())


def run(command: Sequence[str], variables: Mapping[str, str]) -> Outcome:
    """Run a command to its end; one that hangs is killed with all it started."""
    with subprocess.Popen(
        command,
        env=dict(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            stderr += f"\nkilled after {TIME_LIMIT_S} s"
    return Outcome(process.returncode, stdout, stderr)


def on_two_gpus(program: str, *words: str) -> Outcome:
    """Run one of the programs in two processes, a GPU each."""
    workers = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *workers, str(PROGRAMS / f"{program}.py"), *words]
    return run(command, environment({}))


@contextmanager
def started(
    commands: Mapping[Key, tuple[Sequence[str], Mapping[str, str]]],
) -> Iterator[dict[Key, Future[Outcome]]]:
    """Start commands, each with its environment, beside each other; on leaving all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(commands))) as pool:
        yield {
            name: pool.submit(run, command, variables)
            for name, (command, variables) in commands.items()
        }
