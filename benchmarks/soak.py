"""A long run: several programs at once on one allocator, for tens of millions of calls.

The programs are in native/soak_programs.h: training steps, steps of changing length, a cache and
bursts of small blocks, each in a thread and on a stream of its own. From a quarter of the calls on,
memory is trimmed, defragmented, limited below what is needed, and asked for in vain. At the end
everything is freed and given back. A run fails where an answer was wrong, an invariant does not
hold, or more is left or taken than a bound allows: `violations` has the bounds and their reasons.

Cases: `accounting`, a simulated device that only counts; `memfd`, one with real bytes, where each
block is marked at both ends; with --driver cuda, `cuda`: the GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Measurement, Options, UnavailableError
from benchmarks.native.build import load_library
from vramx.memory.replay import load_core
from vramx.sizes import GIB, KIB, MIB

if TYPE_CHECKING:
    from vramx._core import Devices

DESCRIPTION = "tens of millions of calls by several threads: what breaks, leaks or is left"

THREADS = 4
SAMPLE_PERIOD_S = 0.02
POLL_PERIOD_S = 0.005
MARKS = (0.1, 0.5, 1.0)  # shares of the calls at which the process is measured in any case
# A leak of glibc's smallest block in a thousand calls is to be seen.
SMALLEST_LEAK_BYTES_PER_CALL = 32 / 1000
# What glibc may add to the heap of an arena beyond what is asked for (M_TOP_PAD); there is an arena
# for each thread, and the main one.
HEAP_SLACK_BYTES = (THREADS + 1) * 128 * KIB
# What the simulated device keeps of a mapping: a tree's node of 64 bytes, in glibc's block for it.
MAPPING_BYTES = 80


@dataclass(frozen=True)
class Load:
    """How much a case runs, and on what.

    live_bytes: what all programs may hold at once, by their shares. They reach about 70 % of it,
        since their peaks do not coincide.
    leaked_per_round: bytes of host memory that a program loses each round: a defect, for tests.
    """

    calls: int
    live_bytes: int
    device: int = 0
    has_bytes: bool = False
    leaked_per_round: int = 0


@dataclass(frozen=True)
class Sample:
    """What the process and the allocator take at one moment."""

    calls: int
    rss_bytes: int
    held_bytes: int
    aliases: int
    alias_mappings: int
    host_bytes: int  # of the allocator's bookkeeping, by its own count


@dataclass(frozen=True)
class Run:
    """A finished run."""

    load: Load
    samples: list[Sample]  # in the order of time
    marks: list[Sample]  # one for each of MARKS
    seconds: float
    progress: dict[str, int]
    stats: dict[str, Any]  # when every block was freed
    check: str
    held_bytes_at_end: int
    most_alias_mappings: int  # as configured


class _Plan(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_uint64),
        ("live_bytes", ctypes.c_uint64),
        ("streams", ctypes.POINTER(ctypes.c_uint64)),
        ("threads", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("has_bytes", ctypes.c_uint32),
        ("leaked_per_round", ctypes.c_uint32),
    )


COUNTS = (
    "calls",
    "ooms",
    "reliefs",
    "broken",
    "is_done",
    "undisturbed_live_bytes",
    "undisturbed_reserved_bytes",
)


class _Progress(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTS)


def cases(options: Options) -> list[str]:
    core = load_core()
    if options.driver != "cuda":
        return ["accounting", "memfd"]
    if not core.probe_cuda()["devices"]:
        raise UnavailableError("it needs a GPU")
    return ["cuda"]


def measure(case: str, options: Options) -> list[Measurement]:
    devices, load, streams = open_case(case, options)
    run = soak(devices, load, streams)
    if found := violations(run):
        raise RuntimeError("; ".join(found))
    return measurements(run)


def open_case(case: str, options: Options) -> tuple[Devices, Load, list[int]]:
    """Return the devices of a case, what to run on them, and a stream for each thread."""
    core = load_core()
    streams = list(range(1, THREADS + 1))
    if case == "cuda":
        return _open_gpu(core, options)
    if case == "accounting":
        calls = 1_000_000 if options.quick else 50_000_000
        return core.open_simulated(1, 80 * GIB, 2 * MIB, False), Load(calls, 24 * GIB), streams
    # Each mapping is one of the 65,530 that the host allows a process, hence the granularity.
    calls = 500_000 if options.quick else 5_000_000
    return core.open_simulated(1, 4 * GIB, 256 * KIB), Load(calls, GIB, 0, True), streams


def _open_gpu(core: Any, options: Options) -> tuple[Devices, Load, list[int]]:
    import torch

    calls = 1_000_000 if options.quick else 50_000_000
    total_bytes = torch.cuda.mem_get_info(options.device)[1]
    load = Load(calls, min(24 * GIB, total_bytes // 2), options.device)
    # torch keeps the streams of its pool for as long as the process lives.
    streams = [torch.cuda.Stream(options.device).cuda_stream for _ in range(THREADS)]
    return core.open_gpus(devices=[options.device]), load, streams


def soak(devices: Devices, load: Load, streams: Sequence[int]) -> Run:
    """Run a load to its end, free everything, give everything back, and say what was seen."""
    library = load_library(Path(__file__).parent / "native" / "soak.cpp")
    library.vramx_soak_start.restype = ctypes.c_void_p
    library.vramx_soak_most_alias_mappings.restype = ctypes.c_uint64
    started = time.monotonic()
    samples, marks, progress = _Watch(library, devices, load, streams).to_the_end()
    seconds = time.monotonic() - started
    stats = dict(devices.stats(load.device))
    check = devices.check(load.device)
    devices.trim(load.device)
    return Run(
        load,
        samples,
        marks,
        seconds,
        progress,
        stats,
        check or devices.check(load.device),
        devices.held(load.device),
        int(library.vramx_soak_most_alias_mappings()),
    )


class _Watch:
    """Starts a run, looks at it fifty times a second, and finishes it."""

    def __init__(
        self, library: ctypes.CDLL, devices: Devices, load: Load, streams: Sequence[int]
    ) -> None:
        self._library, self._devices, self._load = library, devices, load
        plan = _Plan(
            load.calls,
            load.live_bytes,
            (ctypes.c_uint64 * len(streams))(*streams),
            len(streams),
            load.device,
            load.has_bytes,
            load.leaked_per_round,
        )
        handle = ctypes.c_void_p(devices.handle_address)
        self._soak = ctypes.c_void_p(library.vramx_soak_start(handle, ctypes.byref(plan)))
        self._progress = _Progress()
        self._samples: list[Sample] = []
        self._marks: list[Sample] = []

    def to_the_end(self) -> tuple[list[Sample], list[Sample], dict[str, int]]:
        due = time.monotonic()
        while True:
            self._library.vramx_soak_look(self._soak, ctypes.byref(self._progress))
            self._mark()
            if time.monotonic() >= due:
                due += SAMPLE_PERIOD_S
                self._samples.append(self._sample())
            if self._progress.is_done:
                break
            time.sleep(POLL_PERIOD_S)
        self._library.vramx_soak_finish(self._soak, ctypes.byref(self._progress))
        progress = {name: int(getattr(self._progress, name)) for name in COUNTS}
        return self._samples, self._marks, progress

    def _mark(self) -> None:
        while (
            len(self._marks) < len(MARKS)
            and self._progress.calls >= MARKS[len(self._marks)] * self._load.calls
        ):
            # So that the size of the process is what is in use, not what was in use at some time.
            self._library.vramx_soak_trim_heap()
            self._marks.append(self._sample())
            self._samples.append(self._marks[-1])

    def _sample(self) -> Sample:
        stats = self._devices.stats(self._load.device)
        return Sample(
            calls=int(self._progress.calls),
            rss_bytes=resident_bytes(),
            held_bytes=self._devices.held(self._load.device),
            aliases=stats["alias_count"],
            alias_mappings=stats["alias_mappings"],
            host_bytes=stats["host_bytes"],
        )


def resident_bytes() -> int:
    """Return the memory of this process, without the simulated device's where the kernel tells."""
    sizes = _process_sizes()
    return int(sizes.get("RssAnon", sizes["VmRSS"]).split()[0]) * KIB


def _process_sizes() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)


def violations(run: Run) -> list[str]:
    """Name every bound and every promise that a run did not keep."""
    found = []
    if run.progress["broken"]:
        found.append(f"{run.progress['broken']} answers were wrong or marks overwritten")
    if run.check:
        found.append(f"check: {run.check}")
    if live := run.stats["allocated_bytes"]["all"]["current"]:
        found.append(f"{live} bytes are live after every block was freed")
    if run.held_bytes_at_end:
        found.append(f"{run.held_bytes_at_end} bytes are held after the last trim")
    # An allocator with a pool for each stream needs the peak of each, even without fragmentation.
    reserved = run.progress["undisturbed_reserved_bytes"]
    if reserved > run.load.live_bytes:
        found.append(f"{reserved} bytes were reserved for programs of {run.load.live_bytes}")
    mappings = max(sample.alias_mappings for sample in run.samples)
    if mappings > run.most_alias_mappings:
        found.append(f"aliases took {mappings} mappings of {run.most_alias_mappings}")
    if (growth := rss_growth_bytes(run)) > (bound := rss_growth_bound_bytes(run)):
        found.append(f"the process grew by {growth} bytes in the second half, above {bound}")
    return found


def rss_growth_bytes(run: Run) -> int:
    return run.marks[2].rss_bytes - run.marks[1].rss_bytes


def rss_growth_bound_bytes(run: Run) -> int:
    """Return what the process may grow by in the second half of the calls.

    The bookkeeping that the allocator counts itself, which follows the number of blocks; the
    simulated device's of the aliases, as many as there were at once, for few of its nodes' pages
    come free while others are live; what malloc may keep; and what the smallest leak that is looked
    for would come to.
    """
    middle, end = run.marks[1], run.marks[2]
    bookkeeping = max(0, end.host_bytes - middle.host_bytes)
    mappings = max(each.alias_mappings for each in run.samples if each.calls >= middle.calls)
    bookkeeping += max(0, mappings - middle.alias_mappings) * MAPPING_BYTES
    leak = int(SMALLEST_LEAK_BYTES_PER_CALL * (end.calls - middle.calls))
    # gVisor does not tell the pages of files, the device's memory among them, from others.
    is_mixed = run.load.has_bytes and "RssAnon" not in _process_sizes()
    of_device = end.held_bytes if is_mixed else 0
    return bookkeeping + HEAP_SLACK_BYTES + leak + of_device


def measurements(run: Run) -> list[Measurement]:
    def highest(name: str) -> float:
        return float(max(getattr(sample, name) for sample in run.samples))

    progress = run.progress
    ratio = progress["undisturbed_reserved_bytes"] / progress["undisturbed_live_bytes"]
    return [
        Measurement("calls", "1", [float(progress["calls"])]),
        Measurement("calls_per_second", "1/s", [progress["calls"] / run.seconds]),
        *(
            Measurement(f"rss_at_{share:.0%}", "B", [float(mark.rss_bytes)])
            for share, mark in zip(MARKS, run.marks, strict=True)
        ),
        Measurement("peak_reserved_ratio", "1", [ratio]),
        Measurement("aliases_max", "1", [highest("aliases")]),
        Measurement("alias_mappings_max", "1", [highest("alias_mappings")]),
        Measurement("host_bytes_max", "B", [highest("host_bytes")]),
        Measurement("recovered_ooms", "1", [float(progress["ooms"])]),
    ]
