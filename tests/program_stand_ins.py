"""Stand-ins for whole torch programs: what they print, the allocators, and a machine with GPUs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from child_processes import python

from benchmarks.harness import RowWriter, read_csv
from benchmarks.programs._cases import Figures
from benchmarks.programs._launch import Allocator, Job, Outcome
from vramx.sizes import GIB

ROOT = Path(__file__).resolve().parent.parent
FAKE = tuple(
    Allocator(name, environment=(("FAKE_ALLOCATOR", name),))
    for name in ("native", "expandable", "vramx")
)
NATIVE, EXPANDABLE, VRAMX = FAKE
ON_CPU = Allocator("none", environment=(("CUDA_VISIBLE_DEVICES", ""),))
GOOD_REPORT: dict[str, Any] = {
    "allocator": "vramx",
    "warmup": 1,
    "step_ms": [50.0, 10.0, 12.0],
    "losses": ["0x1p+0", "0x1p-1", "0x1p-2"],
    "device_calls": [9, 2, 2],
    "driver_calls": [9, 0, 0],
    "peak_allocated_bytes": 10 * GIB,
    "peak_reserved_bytes": 10 * GIB,
    "alloc_retries": 0,
    "ooms": 0,
    "extra": {},
}
# Says what a program says, for the allocator that the environment names.
PROGRAM = f"""
import json, os
from benchmarks.programs import _turn
turn = _turn.wait()
report = {GOOD_REPORT!r}
report["allocator"] = os.environ["FAKE_ALLOCATOR"]
report["extra"] = {{"cap": turn.cap_bytes or 0}}
print("loading")
print(json.dumps(report))
"""


def outcome(name: str = "vramx", status: str = "ok", **changes: Any) -> Outcome:
    reports = ({**GOOD_REPORT, "allocator": name, **changes},) if status == "ok" else ()
    return Outcome(status, reports, 1.0)


def line(case: str, metric: str, *values: float) -> dict[str, Any]:
    """Return what a program prints of a figure."""
    return {"case": case, "metric": metric, "unit": "1", "values": list(values)}


def figures_of(*lines: dict[str, Any]) -> Figures:
    return {(item["case"], item["metric"]): item["values"] for item in lines}


def run_tiny(code: str) -> list[dict[str, Any]]:
    """Run a program's functions at their smallest size on this processor; return what they say."""
    # As conftest.py does for this process: transformers imports torchvision.
    code = f"from torchvision_operators import name_missing; name_missing(); {code}"
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    small = {"PROGRAM_SIZE": "tiny", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = python("-c", code, cwd=ROOT, env={**os.environ, **small})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]


def machine_with(count: int) -> Callable[[], Any]:
    return lambda: SimpleNamespace(probe_cuda=lambda: {"devices": [{}] * count})


def make_writer(folder: Path) -> RowWriter:
    return RowWriter("torch_programs", "vramx bench", folder / "rows.csv", lambda row: None)


def rows(tmp_path: Path) -> list[dict[str, str]]:
    """Return what the fixture `writer` has written."""
    return read_csv(tmp_path / "rows.csv")


@dataclass(frozen=True)
class Launched:
    """What a fake launch is told when a process has its turn."""

    job: Job
    cap_bytes: int | None
    stop: threading.Event


class FakeProcess:
    """A process that waits for its turn, whose outcome is what a function says."""

    def __init__(self, job: Job, ended: Callable[[Launched], Outcome]) -> None:
        self.job = job
        self.is_ready = False
        self.was_cancelled = False
        self._ended = ended

    def take_turn(
        self, cap_bytes: int | None = None, stop: threading.Event | None = None
    ) -> Outcome:
        self.begin(cap_bytes)
        self.comes_to_turn(stop or threading.Event())
        return self.finish()

    def wait_until_ready(self, stop: threading.Event) -> None:
        self.is_ready = True

    def begin(self, cap_bytes: int | None) -> None:
        self._cap_bytes = cap_bytes

    def comes_to_turn(self, stop: threading.Event) -> bool:
        self._outcome = self._ended(Launched(self.job, self._cap_bytes, stop))
        return False

    def take_step(self) -> None:
        raise AssertionError("it came to no step")

    def finish(self) -> Outcome:
        return self._outcome

    def cancel(self) -> None:
        self.was_cancelled = True


def ended_with(*lines: dict[str, Any], status: str = "ok") -> FakeProcess:
    """Return a process that printed these lines."""
    return FakeProcess(Job(Path("x"), ON_CPU), lambda _: Outcome(status, lines, 1.0))


def launcher(ended: Callable[[Launched], Outcome]) -> Callable[[Job], FakeProcess]:
    return lambda job: FakeProcess(job, ended)
