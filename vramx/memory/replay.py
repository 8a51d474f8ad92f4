"""Replays a recorded trace under allocation policies and reports what each would have cost.

    live        the sum of requested bytes: no allocator can reserve less
    native      a model of torch's caching allocator
    expandable  a model of the same with expandable_segments:True
    vramx       the allocator itself, on a simulated device or on the GPU

The work is in the compiled core; this file checks arguments and gives the answers names. It needs
neither torch nor a GPU. A replay takes about 100 ns an event; finding the smallest capacity takes
some fifteen replays.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vramx.errors import (
    InvalidValueError,
    MissingDependencyError,
    TraceError,
    VramxError,
    refused,
)
from vramx.memory.snapshot import Snapshot
from vramx.memory.trace import Trace, load_trace
from vramx.sizes import MIB, format_size, parse_size

POLICIES = ("live", "native", "expandable", "vramx")
DRIVERS = ("sim", "cuda")
CHUNK_BYTES = 2 * MIB  # the smallest piece that a driver hands out

# What the core reports of a run; the rest of a ReplayResult belongs to the trace.
_FIGURES = (
    *("peak_reserved_bytes", "peak_allocated_bytes", "oom", "oom_event", "ns_per_event"),
    *("driver_calls", "driver_us", "driver_us_second_half", "retries", "mismatches", "timeline"),
)

# A short run is timed again, up to so many runs or so much time in all.
_TIMED_RUNS = 9
_TIMED_NS = 50e6

# Called with the policy, the events done and the events in all; may raise to stop the replay.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay, beyond which policy and how much memory.

    driver: "sim", a simulated device with an H200's call costs, or "cuda", the GPU `device`.
        Only the policy vramx calls a driver; the others are models either way.
    samples: buckets of the timeline to keep, 0 for none.
    """

    driver: str = "sim"
    device: int = 0
    samples: int = 0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise refused("driver", self.driver, DRIVERS)
        if self.device < 0 or self.samples < 0:
            raise InvalidValueError("device and samples must not be negative")


@dataclass(frozen=True, eq=False)
class Timeline:
    """Memory over time: the highest value in each of equally long stretches of the run."""

    time_us: npt.NDArray[np.float64]
    live_bytes: npt.NDArray[np.uint64]
    reserved_bytes: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ReplayResult:
    """What one policy did with one trace.

    peak_allocated_bytes is what torch.cuda.max_memory_allocated() says: of the blocks in use, which
    torch's own allocator leaves up to 1 MiB larger than what was asked for (peak_live_bytes).
    ns_per_event is the time of the loop over the events, by their number; the median of several
    runs where one takes a few milliseconds. oom_event is the event that did not fit, or -1;
    oom_as_recorded says that this request failed when it was recorded as well. min_capacity_bytes
    is None where it was not asked for, and where the run is more than any device holds (4 TiB).
    driver_us_second_half shows whether driver calls go on once a periodic program has settled.
    mismatches counts blocks whose bytes changed under their owner: anything but 0 is a defect.
    """

    trace: str
    policy: str
    events: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    min_capacity_bytes: int | None
    oom: bool
    oom_event: int
    oom_as_recorded: bool
    ns_per_event: float
    driver_calls: Mapping[str, int]
    driver_us: float
    driver_us_second_half: float
    trace_us: float
    retries: int
    mismatches: int
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values under the keys of the JSON report."""
        return {
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "min_capacity_bytes": self.min_capacity_bytes,
            "oom": self.oom,
            "ns_per_event": self.ns_per_event,
            "driver_calls": dict(self.driver_calls),
            "driver_us": self.driver_us,
            "driver_us_second_half": self.driver_us_second_half,
            "trace_us": self.trace_us,
        }


def replay(
    trace: Trace | Snapshot | str | os.PathLike[str],
    policies: str | Iterable[str] = POLICIES,
    *,
    capacity: int | str | None = None,
    min_capacity: bool = False,
    options: ReplayOptions | None = None,
) -> list[ReplayResult]:
    """Replay a trace under each policy.

    Args:
        trace: a Trace or a Snapshot, or the path of a trace (.npz) or a torch memory snapshot.
        policies: names of POLICIES, one or several; results come in this order.
        capacity: the device's memory, in bytes or as "24GiB"; unlimited by default.
        min_capacity: also find the smallest capacity under which the trace still runs.
        options: driver, device, timeline and progress; see ReplayOptions.

    Raises:
        InvalidValueError: a policy is unknown, the trace is something else, or the capacity is not
            a size or is less than the 2 MiB of one chunk.
        TraceError: the trace cannot be read, or its events contradict each other.
        MissingDependencyError: vramx was installed without its compiled core.

    Example:
        >>> for result in replay("train.pickle", capacity="24GiB"):     # doctest: +SKIP
        ...     print(result.policy, result.peak_reserved_bytes, result.oom)
    """
    names = check_policies(policies)
    capacity_bytes = check_capacity(capacity)
    options = options or ReplayOptions()
    if isinstance(trace, Snapshot):
        trace = trace.trace
    elif isinstance(trace, (str, os.PathLike)):
        trace = load_trace(trace)
    elif not isinstance(trace, Trace):
        raise refused("trace", trace, "are a Trace, a Snapshot and a path")
    replayer = _Replayer(trace, options)
    return [replayer.result(name, capacity_bytes, min_capacity) for name in names]


def check_policies(policies: str | Iterable[str]) -> list[str]:
    """Return the policies without repetition, or raise InvalidValueError for one unknown."""
    is_one = isinstance(policies, str) or not isinstance(policies, Iterable)
    names: list[Any] = [policies] if is_one else list(policies)
    for name in names:
        if name not in POLICIES:
            raise refused("policy", name, POLICIES)
    if not names:
        raise InvalidValueError(f"no policy is named; accepted are {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


def check_capacity(capacity: int | str | None) -> int:
    """Return the capacity in bytes, 0 for unlimited, or raise InvalidValueError."""
    if capacity is None:
        return 0
    capacity_bytes = parse_size(capacity)
    if capacity_bytes < CHUNK_BYTES:
        raise InvalidValueError(
            f"capacity {format_size(capacity_bytes)} is less than one chunk; "
            f"{format_size(CHUNK_BYTES, 0)} or more is accepted"
        )
    return capacity_bytes


def load_core() -> Any:
    """Return the compiled core; it is imported by what needs it, so that the rest works without."""
    try:
        from vramx import _core
    except ImportError as error:
        raise MissingDependencyError(
            f"the compiled core cannot be loaded ({error}); reinstall with: pip install vramx"
        ) from None
    return _core


def open_replay(trace: Trace) -> Any:
    """Return the core's replay of a trace, which has checked its events."""
    core = load_core()
    try:
        return core.Replay(trace.op, trace.id, trace.size, trace.stream, trace.time_us)
    except ValueError as error:
        raise TraceError(str(error)) from None


class _Replayer:
    """One trace, opened in the core, with the options that hold for every policy."""

    def __init__(self, trace: Trace, options: ReplayOptions) -> None:
        self._trace = trace
        self._core = open_replay(trace)
        self._options = options

    def result(self, policy: str, capacity_bytes: int, find_minimum: bool) -> ReplayResult:
        try:
            figures = self._run(policy, capacity_bytes)
            figures["ns_per_event"] = self._typical_ns(policy, capacity_bytes, figures)
            minimum = self._min_capacity(policy) if find_minimum else None
        except RuntimeError as error:  # no GPU, or one without virtual memory management
            raise VramxError(f"policy {policy}: {error}") from error
        timeline = figures.pop("timeline")
        return ReplayResult(
            trace=self._trace.name,
            policy=policy,
            events=self._core.events,
            peak_live_bytes=self._core.peak_live_bytes,
            min_capacity_bytes=minimum,
            trace_us=self._core.trace_us,
            oom_as_recorded=figures["oom"] and self._failed_when_recorded(figures["oom_event"]),
            timeline=Timeline(**timeline) if timeline is not None else None,
            **figures,
        )

    def _failed_when_recorded(self, event: int) -> bool:
        return int(self._trace.id[event]) in self._trace.failed

    def _run(self, policy: str, capacity_bytes: int) -> dict[str, Any]:
        figures: dict[str, Any] = self._core.run(
            policy,
            capacity_bytes=capacity_bytes,
            driver=self._options.driver if policy == "vramx" else "sim",
            device=self._options.device,
            samples=self._options.samples,
            progress=self._progress(policy),
        )
        return {name: figures[name] for name in _FIGURES}

    def _typical_ns(self, policy: str, capacity_bytes: int, first: Mapping[str, Any]) -> float:
        # A single run of a short program says more of cold caches and the host's other work.
        runs = [float(first["ns_per_event"])]
        if policy == "vramx" and self._options.driver == "cuda":
            return runs[0]
        while len(runs) < _TIMED_RUNS and sum(runs) * self._core.events < _TIMED_NS:
            again = self._core.run(policy, capacity_bytes=capacity_bytes, driver="sim")
            runs.append(float(again["ns_per_event"]))
        return statistics.median(runs)

    def _min_capacity(self, policy: str) -> int | None:
        if self._core.run(policy, driver="sim")["oom"]:  # a search would not end
            return None
        minimum: int = self._core.min_capacity(policy, progress=self._progress(policy))
        return minimum

    def _progress(self, policy: str) -> Callable[[int, int], None] | None:
        report = self._options.progress
        if report is None:
            return None
        return lambda done, total: report(policy, done, total)
