"""The process that benchmarks/seeing.py starts for one way to run out of memory (_ooms.py).

    python _seeing_confirm.py KIND

The program runs once with all of the GPU, and its recording says how much torch's allocator needs;
then with a little less, watched by `vramx run`, until it fails and leaves its snapshot. `vramx
explain --confirm` reads that and tries what it advises. Prints a line of JSON for each figure: what
each remedy was said to hold and what it held. Uses no CUDA itself; takes about six times as long as
a Python with torch takes to start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.programs import _turn
from benchmarks.programs._launch import ALLOCATORS, PROGRAMS
from vramx.memory.explain import explain
from vramx.memory.snapshot import Snapshot

SCRIPT = str(PROGRAMS / "_ooms.py")
OWN_LIMIT = ("limit", "another_process")  # kinds that make their limit themselves
RANKS = 2
# Of what torch's allocator needs. The first is what it lacks at the very end, but the model of it
# is exact to half a percent only.
SHARES = (0.998, 0.994, 0.99, 0.98)


def main(kind: str) -> None:
    _turn.wait()
    case = f"confirm {kind}"
    with tempfile.TemporaryDirectory() as folder:
        needed = needed_bytes(kind, Path(folder) / "free.pickle")
        failure = provoked(kind, needed, Path(folder))
        if failure is None:
            tell(case=case, status="failed: it ran in less than it needs")
            return
        snapshot, limit = failure
        report = explained(kind, snapshot, limit)
    tell(case=case, metric="needed_bytes", unit="B", values=[needed])
    tell(case=case, metric="limit_bytes", unit="B", values=[limit])
    tell(case=case, metric=f"cause_{report['cause']}", unit="1", values=[1])
    tell(case=case, metric="remedies", unit="1", values=[len(report["confirmed"])])
    for each in report["confirmed"]:
        report_remedy(case, each)


def needed_bytes(kind: str, recording: Path) -> int:
    """Return what torch's allocator needs for the whole program."""
    run([*command(kind, None), "--record", str(recording)], {})
    remedies = explain(Snapshot.load(recording)).remedies
    return next(each.needs_bytes or 0 for each in remedies if each.policy == "native")


def provoked(kind: str, needed: int, folder: Path) -> tuple[Path, int] | None:
    """Return the snapshot of a run that was out of memory, and the limit at which it was."""
    for share in SHARES:
        limit = int(share * needed)
        watched = ["run", "--record", *([] if kind in OWN_LIMIT else ["--limit", str(limit)])]
        words = [sys.executable, "-m", "vramx", *watched, "--", *command(kind, limit)]
        settings = {"VRAMX_ALLOCATOR": "torch", "VRAMX_OOM_DIR": str(folder)}
        done = run(words, settings, fails=True)
        found = sorted(folder.glob("oom-*.pickle"))
        if done.returncode and found:
            return found[0], limit
        if done.returncode:
            raise RuntimeError(f"it failed without a snapshot: {last_line(done.stderr)}")
    return None


def explained(kind: str, snapshot: Path, limit: int) -> dict[str, Any]:
    """Return what `vramx explain --confirm` reports."""
    given = [] if kind in OWN_LIMIT else ["--capacity", str(limit)]
    words = ["explain", str(snapshot), "--json", *given, "--confirm", "--"]
    done = run([sys.executable, "-m", "vramx", *words, *command(kind, limit)], {}, fails=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"vramx explain: {last_line(done.stderr)}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def command(kind: str, limit: int | None) -> list[str]:
    """Return what a user types to run the program."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    own = ["--limit", str(limit)] if limit is not None and kind in OWN_LIMIT else []
    return [sys.executable, *(launcher if kind == "rank" else []), SCRIPT, kind, *own]


def run(
    words: Sequence[str], settings: dict[str, str], *, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed, unless it may.
    """
    environment = {**os.environ, **settings}
    environment.pop(_turn.TURN, None)
    done = subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and not fails:
        raise RuntimeError(f"{words[-1]}: {last_line(done.stderr)}")
    return done


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def report_remedy(case: str, confirmed: dict[str, Any]) -> None:
    """Report what one remedy held beside what was said of it."""
    policy, said, held = (confirmed[key] for key in ("policy", "expected_bytes", "measured_bytes"))
    if confirmed["exit_code"] or not confirmed["is_under_it"] or held is None:
        tell(case=case, status=f"failed: under {policy} it ended with {confirmed['exit_code']}")
        return
    tell(case=case, metric=f"{policy}_said_bytes", unit="B", values=[said])
    tell(case=case, metric=f"{policy}_held_bytes", unit="B", values=[held])
    tell(case=case, metric=f"{policy}_off", unit="1", values=[held / said - 1])


def tell(**line: Any) -> None:
    print(json.dumps({**line, "allocator": ALLOCATORS[0].name}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
