"""A program's turn on the GPU: the lines on its standard input that it waits for.

The side that runs programs starts several at a time, because their imports take longer than what is
measured, and gives the turn to one after the other when all are waiting: to begin, and where
programs are compared step by step, once more for each step. Standard input carries it because that
reaches a program through any command in front of it (`vramx run`), because the line can say what
was not known when the program was started (its cap), and because it ends with the harness, so that
no program waits for ever or begins unasked. Imports no torch. A turn lasts until the program comes
to its next step, or ends.

Read from the environment:
    PROGRAM_TURN        the descriptor to say on that the program waits for a turn; one run by hand,
                        for which it is not set, begins at once
    PROGRAM_STEPS       "1" if each step has a turn of its own
    PROGRAM_CAP_BYTES   the cap of a program run by hand; no cap if not set
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass

TURN = "PROGRAM_TURN"
STEPS = "PROGRAM_STEPS"
_NO_CAP = "none"
_STEP = "step"


@dataclass(frozen=True)
class Turn:
    """What a program is told when it may begin."""

    cap_bytes: int | None
    waited_s: float


def wait() -> Turn:
    """Wait until this process may touch the GPU.

    Raises:
        SystemExit: whoever started the program is gone.
    """
    if TURN not in os.environ:
        cap = os.environ.get("PROGRAM_CAP_BYTES")
        return Turn(None if cap is None else int(cap), 0.0)
    start_s = time.monotonic()
    line = _ask()
    return Turn(None if line == _NO_CAP else int(line), time.monotonic() - start_s)


def wait_for_step() -> float:
    """Let others take a step where there are some; return the seconds until it was our turn.

    Raises:
        SystemExit: whoever started the program is gone.
    """
    if STEPS not in os.environ:
        return 0.0
    start_s = time.monotonic()
    _ask()
    return time.monotonic() - start_s


def _ask() -> str:
    with contextlib.suppress(BrokenPipeError):  # nobody reads: the next line says so
        os.write(int(os.environ[TURN]), b".")
    line = sys.stdin.readline().strip()
    if not line:
        raise SystemExit("there is no turn: whoever started this program is gone")
    return line


def give(process: subprocess.Popen[bytes], cap_bytes: int | None) -> None:
    """Let a process begin; one that has ended already is left to be found ended."""
    _write_line(process, _NO_CAP if cap_bytes is None else str(cap_bytes))


def give_step(process: subprocess.Popen[bytes]) -> None:
    """Let a process take a step."""
    _write_line(process, _STEP)


def _write_line(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
