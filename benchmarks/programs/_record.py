"""The process that benchmarks/record_traces.py starts for a program: runs it and keeps its trace.

    python _record.py PROGRAM FOLDER SECONDS

Torch's history of its native allocator has every allocation, requested free and completed free,
with stream, time and the requested bytes, unrounded (an entry's size is the block's
`requested_size`). Times are kept in tenths of a millisecond. It is switched on before the program
touches the GPU, without stack traces, so that an event costs well under a microsecond. A program
that has not ended after SECONDS is stopped where it is: the trace is then of so much of it. Prints
a line of JSON; needs a GPU.
"""

from __future__ import annotations

import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.programs._report import tell
from vramx.memory.replay import open_replay
from vramx.memory.trace import ALLOCATE, Trace, load_trace

# More than any program here has; torch keeps room for those alone that there are.
MAX_EVENTS = 4_000_000
# A replay asks how long a program took and what was freed 10 ms before. Single microseconds are
# noise, which does not pack: they are three fifths of a file, and change no figure of a replay by
# more than 1e-5 of it.
TICK_US = 100


class StoppedError(BaseException):
    """The program's time is over. Not an Exception, so that no program takes it for its own."""


def main(arguments: list[str]) -> None:
    program, folder, limit_s = Path(arguments[0]), Path(arguments[1]), float(arguments[2])
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=MAX_EVENTS)
    is_whole = run(program, limit_s)
    torch.cuda.synchronize()
    reserved_bytes = torch.cuda.max_memory_reserved()
    trace = history()
    path = folder / f"{program.stem}.npz"
    trace.save(path)
    facts = {
        **describe(load_trace(path)),
        "file_bytes": path.stat().st_size,
        "is_whole": is_whole,
        "native_peak_reserved_bytes": reserved_bytes,
    }
    tell(case=program.stem, **facts)


def run(program: Path, limit_s: float) -> bool:
    """Run a program as a script; say whether it came to its end in time.

    Raises:
        Exception: whatever the program raises.
    """
    try:
        with stopped_after(limit_s):
            runpy.run_path(str(program), run_name="__main__")
    except StoppedError:
        return False
    return True


@contextmanager
def stopped_after(limit_s: float) -> Iterator[None]:
    """Raise StoppedError in the main thread when the time is over."""

    def stop(_number: int, _frame: Any) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def history() -> Trace:
    """Return what torch has recorded so far.

    Raises:
        TraceError: there is nothing, or what there is makes no trace.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        trace = load_trace(path, device=0)
    return replace(trace, time_us=trace.time_us // TICK_US * TICK_US)


def describe(trace: Trace) -> dict[str, Any]:
    """Replay a trace, which checks it, and return its figures.

    Raises:
        TraceError: its events make no sense together.
    """
    replay = open_replay(trace)
    modelled: dict[str, Any] = replay.run("native")
    return {
        "events": len(trace),
        "allocations": int((trace.op == ALLOCATE).sum()),
        "streams": len(np.unique(trace.stream)),
        "seconds": float(trace.time_us[-1]) / 1e6,
        "peak_live_bytes": replay.peak_live_bytes,
        "modelled_peak_reserved_bytes": modelled["peak_reserved_bytes"],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
