"""The process that benchmarks/torch_calls.py starts under each allocator: it times single calls.

    python _calls.py LIBRARY PASSES TURNS KIND TRACE...

Prints one line of JSON for each turn of a case as soon as it is measured, so that a crash takes
only what comes after it; it waits for each, and holds no memory at its end. In this order:

    NAME raw                    the first program of one stream
    NAME raw after a graph      the same, with a captured graph alive
    NAME raw beside a pool      the same, with a MemPool alive
    NAME raw, NAME tensor       the programs of one stream, the first as a tensor only; torch.empty
    NAME raw on 3 streams       the programs of several streams, tensor too
    NAME raw beside streams     those of one stream again: the others are idle

KIND "control" is a process of the first three cases alone, without the graph and without the pool:
what they cost is what the others take beside it. Any other measures them all.

The first sixteen passes of each warm up and are not reported: of the recorded programs the slowest
to settle stitched something new in the first twelve. All processes take their turns on one core,
for two cores of a shared host can differ by three quarters.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.programs import _turn
from benchmarks.programs._report import tell
from vramx.memory.trace import ALLOCATE, FREE_REQUESTED, Trace, load_trace
from vramx.sizes import KIB, MIB

WAYS = ("raw", "tensor")  # by the value of the library's is_tensor
EMPTY_BYTES = {"512 B": KIB // 2, "1 MiB": MIB, "64 MiB": 64 * MIB}
EMPTY_PAIRS = 20_000
WARM_UP = 16
# The layout of the library's Event.
EVENT = np.dtype([("size", "<u8"), ("id", "<u4"), ("stream", "<u4")])


def main(arguments: list[str]) -> None:
    library = open_library(Path(arguments[0]))
    passes, turns = int(arguments[1]), int(arguments[2])
    is_control = arguments[3] == "control"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    _turn.wait()
    torch.cuda.init()
    traces = {Path(path).stem: load_trace(path) for path in arguments[4:]}
    of_one = [name for name, trace in traces.items() if not trace.stream.any()]

    def measure(name: str, way: str, beside: str = "", turns: int = turns) -> None:
        for _ in range(turns):
            _turn.wait_for_step()
            report(f"{name} {way}{beside}", replay(library, traces[name], way, passes))
            torch.cuda.empty_cache()  # what one leaves behind is not the next one's

    for name in of_one[:1]:
        measure(name, "raw")
        # Two processes are compared to a few hundredths: each needs a turn that nothing disturbs.
        graph = None if is_control else captured_graph()
        measure(name, "raw", " after a graph", 3 * turns)
        del graph
        pool = None if is_control else torch.cuda.MemPool()
        measure(name, "raw", " beside a pool", 3 * turns)
        del pool
    if not is_control:
        measure_programs(traces, of_one, measure, passes)


def measure_programs(
    traces: dict[str, Trace], of_one: list[str], measure: Callable[..., None], passes: int
) -> None:
    for name in of_one:
        for way in WAYS[1:] if name == of_one[0] else WAYS:
            measure(name, way)
    measure_empty(passes)
    for name, trace in traces.items():
        if name not in of_one:
            for way in WAYS:
                measure(name, way, f" on {int(trace.stream.max()) + 1} streams")
    for name in of_one:
        measure(name, "raw", " beside streams")


def open_library(path: Path) -> ctypes.CDLL:
    """Load the compiled replay and declare its functions."""
    library = ctypes.CDLL(str(path))
    library.vramx_calls_error.restype = ctypes.c_char_p
    size, address = ctypes.c_size_t, ctypes.c_void_p
    integer = ctypes.c_int
    library.vramx_calls_replay.argtypes = [
        *(address, size, size),  # events
        *(address, size, integer, integer),  # streams, device, is_tensor
        *(address, size),  # passes
    ]
    return library


def events_of(trace: Trace) -> npt.NDArray[Any]:
    """Return the events that an allocator sees: a free counts when it is complete.

    Example:
        >>> events_of(load_trace("train.npz"))["size"][0]      # doctest: +SKIP
        4096
    """
    empty = trace.id[(trace.op == ALLOCATE) & (trace.size == 0)]  # no allocator is asked for those
    kept = (trace.op != FREE_REQUESTED) & ~np.isin(trace.id, empty)
    events = np.zeros(int(kept.sum()), EVENT)
    events["size"] = np.where(trace.op == ALLOCATE, trace.size, 0)[kept]
    events["id"] = trace.id[kept]
    events["stream"] = trace.stream[kept]
    return events


def replay(library: ctypes.CDLL, trace: Trace, way: str, passes: int) -> list[float]:
    """Return the nanoseconds of one call, on average over each pass.

    Raises:
        RuntimeError: torch's own error, of the call that failed.
    """
    events = events_of(trace)
    made = [torch.cuda.Stream() for _ in range(int(trace.stream.max()))]
    used = [torch.cuda.default_stream(), *made]
    streams = (ctypes.c_int64 * len(used))(*(stream.stream_id for stream in used))
    pass_ns = np.zeros(passes)
    failed = library.vramx_calls_replay(
        *(events.ctypes.data, len(events), int(trace.id.max()) + 1),
        *(streams, len(streams), torch.cuda.current_device(), WAYS.index(way)),
        *(pass_ns.ctypes.data, passes),
    )
    if failed:
        raise RuntimeError(library.vramx_calls_error().decode(errors="replace"))
    return [float(ns) for ns in pass_ns]


def captured_graph() -> torch.cuda.CUDAGraph:
    """Capture a small program, warmed up on a side stream as torch's documentation has it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.ones(1024, device="cuda").sum()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1024, device="cuda").sum()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def measure_empty(passes: int) -> None:
    for name, size_bytes in EMPTY_BYTES.items():
        _turn.wait_for_step()
        report(f"torch.empty {name}", [time_empty(size_bytes) for _ in range(passes)])


def time_empty(size_bytes: int) -> float:
    """Return the nanoseconds of one torch.empty and the free of its tensor."""
    options: dict[str, Any] = {"dtype": torch.uint8, "device": "cuda"}
    gc.disable()
    start_ns = time.perf_counter_ns()
    for _ in range(EMPTY_PAIRS):
        torch.empty(size_bytes, **options)
    taken_ns = time.perf_counter_ns() - start_ns
    gc.enable()
    return taken_ns / EMPTY_PAIRS


def report(case: str, pass_ns: list[float]) -> None:
    tell(case=case, ns=pass_ns[WARM_UP:])


if __name__ == "__main__":
    main(sys.argv[1:])
