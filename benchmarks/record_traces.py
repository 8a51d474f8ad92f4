"""Records the allocations of the programs of benchmarks/programs/recorded as traces (.npz).

    python -m benchmarks.record_traces --out DIR [--only NAME,...] [--seconds N] [--jobs N]

Each program runs alone in a process under torch's native allocator (benchmarks/programs/_record.py)
and leaves DIR/NAME.npz, which `vramx replay` reads; DIR/traces.csv gets a line for each, with what
it was recorded on. A program that fails or hangs has a line that says why, and the others go on;
the exit code is then 1. All ten take about 4 minutes on an H100. With --jobs, so many share the
GPU: that is faster, and the times in the traces are longer.
"""

from __future__ import annotations

import argparse
import csv
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, UnavailableError
from benchmarks.machine import describe_machine
from benchmarks.programs import _cases, _launch
from benchmarks.programs._launch import ALLOCATORS, PROGRAMS, Job, Outcome, visible_gpus
from vramx.errors import VramxError
from vramx.sizes import format_size

RECORDED = PROGRAMS / "recorded"
CHILD = PROGRAMS / "_record.py"
SECONDS = 20.0  # after which a program is stopped where it is
AROUND_S = 60.0  # for starting Python, importing, and replaying what was recorded


@dataclass(frozen=True)
class Line:
    """What became of one program. Sizes are in bytes; the two peaks are of torch's allocator."""

    trace: str
    status: str
    events: int = 0
    allocations: int = 0
    streams: int = 0
    seconds: float = 0.0
    file_bytes: int = 0
    is_whole: bool = False
    peak_live_bytes: int = 0
    native_peak_reserved_bytes: int = 0
    modelled_peak_reserved_bytes: int = 0

    def __str__(self) -> str:
        if self.status != "ok":
            return f"{self.trace}: {self.status}"
        reserved = (self.native_peak_reserved_bytes, self.modelled_peak_reserved_bytes)
        return (
            f"{self.trace}: {self.events} events in {self.seconds:.1f} s"
            f"{'' if self.is_whole else ' (stopped)'}, {format_size(self.file_bytes)}; live "
            f"{format_size(self.peak_live_bytes)}, reserved {format_size(reserved[0])} (the model "
            f"says {format_size(reserved[1])})"
        )


def programs() -> dict[str, Path]:
    """Return the programs there are, by name."""
    return {path.stem: path for path in sorted(RECORDED.glob("[a-z]*.py"))}


def record(
    names: Sequence[str], out: Path, launch: Callable[[str], Outcome], jobs: int = 1
) -> Iterable[Line]:
    """Run programs, `jobs` at a time; yield what became of each and add it to the table."""
    stop = threading.Event()
    for first in range(0, len(names), jobs):
        together = names[first : first + jobs]
        for name, outcome in zip(together, _cases.at_once(together, launch, stop), strict=True):
            line = line_of(name, outcome)
            append(out / "traces.csv", line)
            yield line


def line_of(name: str, outcome: Outcome) -> Line:
    """Turn an outcome into a line; what is no figure of a line is left out."""
    if not outcome.is_ok:
        return Line(name, outcome.status)
    report = outcome.reports[-1]
    known = {key: report[key] for key in Line.__dataclass_fields__ if key in report}
    return Line(name, outcome.status, **known)


def append(path: Path, line: Line) -> None:
    """Add a line to a table, with what it was recorded on."""
    row: dict[str, Any] = {**asdict(line), **asdict(describe_machine(ROOT))}
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_traces")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", default="", metavar="NAME[,NAME...]", help="these programs")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help="of each program"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="programs at a time")
    parser.add_argument("--device", type=int, default=0, metavar="N")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Record what was asked for; return the exit code."""
    args = parse(arguments)
    known = programs()
    try:
        names = _cases.chosen([each for each in args.only.split(",") if each], known, "program")
        gpu = visible_gpus(args.device, 1)[0]
    except (VramxError, UnavailableError) as error:
        print(f"record_traces: {error}", file=sys.stderr)
        return 2
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    def launch(name: str) -> Outcome:
        words = (str(known[name]), str(out), str(args.seconds))
        limit_s = args.seconds + AROUND_S
        return _launch.run(Job(CHILD, ALLOCATORS[0], words, gpu, limit_s))

    is_good = True
    for line in record(names, out, launch, max(1, args.jobs)):
        print(line, flush=True)
        is_good &= line.status == "ok"
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
