"""What each allocator makes of recorded programs: memory, time and driver calls.

One case for each trace and policy. Ratios are to the trace's peak of live bytes, which no allocator
can go below; they are exact, so they are measured once. `native` and `expandable` are models of
torch's own allocators, `vramx` is the allocator itself, on the simulated device or, with --driver
cuda, on the GPU. The figures to reach are 1.005 for both ratios and 1 % of driver time. The core's
own memory is to grow by 200 bytes a live block at most, which benchmarks/core.py measures; here it
is divided by the blocks at the peak, and with a few hundred of them most of it does not depend on
their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, Measurement, Options, UnavailableError
from vramx.memory import load_trace
from vramx.memory.replay import load_core, open_replay
from vramx.memory.trace import ALLOCATE, FREE_REQUESTED, Trace

DESCRIPTION = "every policy on every recorded trace: reserved memory, smallest capacity, time"

POLICIES = ("native", "expandable", "vramx")
QUICK_POLICIES = ("native", "vramx")
PATTERN_STREAMS = 4
DEFAULT_FOLDERS = (ROOT / "vramx" / "demo", ROOT / "tests" / "traces")


def cases(options: Options) -> list[str]:
    load_core()
    policies = QUICK_POLICIES if options.quick else POLICIES
    return [f"{trace} {policy}" for trace in trace_files(options) for policy in policies]


def trace_files(options: Options) -> dict[str, Path]:
    """Return the traces to replay, by name.

    Raises:
        UnavailableError: the folder has none.
    """
    folders = [Path(options.traces)] if options.traces else DEFAULT_FOLDERS
    found = {path.stem: path for folder in folders for path in sorted(folder.glob("*.npz"))}
    if not found:
        raise UnavailableError("no .npz traces found; name their folder with --traces DIR")
    return found


def few_of(files: dict[str, Path]) -> dict[str, Path]:
    """Return two traces that a quick run replays: the smallest files, in their order."""
    small = sorted(files.values(), key=lambda path: path.stat().st_size)[:2]
    return {name: path for name, path in files.items() if path in small}


def measure(case: str, options: Options) -> list[Measurement]:
    name, policy = case.rsplit(" ", 1)
    trace = load_trace(trace_files(options)[name])
    replay = open_replay(trace)
    driver = options.driver if policy == "vramx" else "sim"

    def run() -> dict[str, Any]:
        figures: dict[str, Any] = replay.run(policy, driver=driver, device=options.device)
        _check(figures)
        return figures

    first = run()  # with cold caches, and the first calls of a driver
    runs = [run() for _ in range(1 if options.quick else 7)]
    figures = runs[0]
    live = replay.peak_live_bytes
    return [
        Measurement("peak_reserved_ratio", "1", [figures["peak_reserved_bytes"] / live]),
        Measurement("min_capacity_ratio", "1", [replay.min_capacity(policy) / live]),
        Measurement("ns_per_event", "ns", [float(each["ns_per_event"]) for each in runs]),
        Measurement("driver_calls", "1", [float(sum(figures["driver_calls"].values()))]),
        *_driver_time(figures, replay.trace_us),
        *(_books(figures, trace) if policy == "vramx" else []),
        *(_on_gpu(replay, [first, *runs], options) if driver == "cuda" else []),
    ]


def _on_gpu(replay: Any, runs: Sequence[dict[str, Any]], options: Options) -> list[Measurement]:
    # What the driver took, beside what the model of its cost says; and bytes written through every
    # block and looked for before its free, the blocks dealt out over several streams.
    modelled_us = replay.run("vramx")["driver_us"]
    checked = replay.run(
        "vramx", driver="cuda", device=options.device, pattern_streams=PATTERN_STREAMS
    )
    return [
        Measurement("driver_us_first_run", "us", [float(runs[0]["driver_us"])]),
        Measurement("driver_us_measured", "us", [float(each["driver_us"]) for each in runs[1:]]),
        Measurement("driver_us_modelled", "us", [modelled_us]),
        Measurement("pattern_mismatches", "1", [float(checked["mismatches"])]),
    ]


def _books(figures: dict[str, Any], trace: Trace) -> list[Measurement]:
    # All that the core keeps in host memory, by what it is kept for when there is most of that: its
    # tables of pages and of what recurs are in it too, which do not grow with the blocks.
    host_bytes = float(figures["host_bytes"])
    return [
        Measurement("host_bytes", "B", [host_bytes]),
        Measurement("host_bytes_per_block", "B", [host_bytes / peak_live_blocks(trace)]),
    ]


def peak_live_blocks(trace: Trace) -> int:
    """Return how many blocks are live at once, at most; a free counts when it is complete."""
    steps = np.where(trace.op == ALLOCATE, 1, np.where(trace.op == FREE_REQUESTED, 0, -1))
    return int(steps.cumsum().max())


def _check(figures: dict[str, Any]) -> None:
    if figures["oom"]:
        raise RuntimeError(f"out of memory at event {figures['oom_event']}, without a limit")
    if figures["mismatches"]:
        raise RuntimeError(f"{figures['mismatches']} blocks changed under their owner")


def _driver_time(figures: dict[str, Any], trace_us: float) -> list[Measurement]:
    # Of the recorded program's own time. The second half shows what remains once it has settled.
    shares = {
        "driver_share": 100 * figures["driver_us"] / trace_us,
        "driver_share_second_half": 100 * figures["driver_us_second_half"] / (trace_us / 2),
    }
    return [Measurement(metric, "%", [share]) for metric, share in shares.items()]
