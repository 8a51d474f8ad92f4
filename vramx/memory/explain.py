"""Why a request failed: who held the memory, did fragmentation matter, what would have fitted.

No advice is given that was not tried: each remedy is a replay of the recording, up to the request
that failed and with it, under another policy and at the capacity that the program had. How far such
a replay can be believed is measured on the recording itself: the recorded allocator is replayed as
well, and compared with what it did. Of a run in which nothing failed the same is said of its peak.
About fifty replays, of 100 ns an event.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from vramx.memory.holders import Holder, Totals, holders, totals
from vramx.memory.pools import Parts, parted
from vramx.memory.replay import CHUNK_BYTES, Progress, ReplayOptions, check_capacity, replay
from vramx.memory.snapshot import FailedRequest, Ids, Snapshot, check_snapshot
from vramx.memory.trace import FREE_REQUESTED
from vramx.sizes import MIB

# Why the request was not served.
FITTING_BLOCK = "fitting_block"  # a free block was large enough, and torch could have used it
ELSEWHERE = "elsewhere"  # what was large enough was of another stream, pool or class of sizes
FRAGMENTATION = "fragmentation"  # enough was free, in pieces too small
SIZE = "size"  # too little was free, however it lay
UNDECIDED = "fragmentation_or_size"  # which of them, the limit decides, and it is not recorded

_BLOCK_UNIT = 512
POLICIES = ("native", "expandable", "vramx")


@dataclass(frozen=True)
class Capacity:
    """What the allocator could hold, as far as the recording tells: from `low` to `high`.

    They are one where the recording has it. Where it does not, the allocator once held `low`, and
    with more than `high` it would have served the request.
    """

    low_bytes: int
    high_bytes: int
    source: str  # "device", "limit" (of torch's own, whose value is not recorded) or "given"


@dataclass(frozen=True)
class Remedy:
    """What one policy needs for the run up to the request and with it."""

    policy: str
    fits: bool | None  # None where the capacity is not known well enough
    needs_bytes: int | None  # None where no device holds it
    peak_reserved_bytes: int  # where nothing limits it
    expected_reserved_bytes: int  # the peak at the recorded capacity, where it fits


@dataclass(frozen=True)
class Fidelity:
    """How well the replay of the recorded policy repeats the recording."""

    policy: str
    reproduced: int
    recorded: int  # events in which memory was taken from the driver or given back
    peak_error: float | None  # of its peak of reserved bytes, relative to one that was recorded
    unmodelled: tuple[str, ...]  # what the recording has and a replay does not
    fails_too: bool | None  # whether its request fails at the recorded capacity; None if none did


@dataclass(frozen=True)
class Explanation:
    """All that is said of a failed request, or of the peak where none failed."""

    snapshot: str
    request: FailedRequest | None
    failures: int
    cause: str | None
    at: Totals
    fitting_hole_bytes: int  # the largest hole of the request's own stream and pool
    enough_from_bytes: int  # the capacity from which on enough was free, in whatever pieces
    capacity: Capacity | None
    holders: tuple[Holder, ...]
    categories: tuple[Holder, ...]  # none where the file does not have them
    recorded_policy: str
    remedies: tuple[Remedy, ...]
    fidelity: Fidelity

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the keys of the JSON report."""
        report = dataclasses.asdict(self)
        report["holders"] = [each.to_dict() for each in self.holders]
        report["categories"] = [each.to_dict() for each in self.categories]
        if self.request is not None:
            report["request"]["stack"] = [frame._asdict() for frame in self.request.stack]
        return report


def explain(
    snapshot: Snapshot, *, capacity: int | str | None = None, progress: Progress | None = None
) -> Explanation:
    """Explain the last request of a snapshot that failed, or its peak where none did.

    Args:
        snapshot: of torch.cuda.memory, with its events.
        capacity: what the allocator could hold, where that is known better than the recording
            tells it: bytes, or "24GiB".
        progress: called with a policy, the events done and the events in all.

    Raises:
        InvalidValueError: the capacity is no size, or less than the 2 MiB of one chunk; or what is
            given is no snapshot.
        TraceError: the events contradict each other.
        MissingDependencyError: vramx was installed without its compiled core.

    Example:
        >>> snapshot = vramx.Snapshot.load("oom.pickle")                 # doctest: +SKIP
        >>> why = explain(snapshot, capacity="3GiB")                     # doctest: +SKIP
        >>> why.cause, [each.policy for each in why.remedies if each.fits]     # doctest: +SKIP
        ('fragmentation', ['vramx'])
    """
    given, snapshot = check_capacity(capacity), check_snapshot(snapshot)
    request = snapshot.failures[-1] if snapshot.failures else None
    event = snapshot.peak_event if request is None else request.event
    limit = Capacity(given, given, "given") if given else recorded_capacity(snapshot, request)
    at = totals(snapshot, event)
    needed = -(-request.size_bytes // _BLOCK_UNIT) * _BLOCK_UNIT if request is not None else 0
    fitting = _fitting_hole(snapshot, request)
    enough_from = at.reserved_bytes - at.free_bytes + needed
    rows = np.arange(len(snapshot.trace)) if request is None else snapshot.rows_until(request)
    parts = parted(snapshot, rows)
    return Explanation(
        snapshot=snapshot.name,
        request=request,
        failures=len(snapshot.failures),
        cause=_cause(needed, fitting, at.largest_hole_bytes, enough_from, limit),
        at=at,
        fitting_hole_bytes=fitting,
        enough_from_bytes=enough_from,
        capacity=limit,
        holders=tuple(holders(snapshot, event)),
        categories=tuple(holders(snapshot, event, "category")) if snapshot.has_categories else (),
        recorded_policy=snapshot.recorded_policy,
        remedies=tuple(
            _remedy(parts, policy, limit, policy == snapshot.recorded_policy, progress)
            for policy in POLICIES
        ),
        fidelity=_fidelity(snapshot, rows, limit, progress),
    )


def recorded_capacity(snapshot: Snapshot, request: FailedRequest | None) -> Capacity | None:
    """Return what the allocator could hold when a request failed, as far as that is recorded."""
    if request is None:
        return None
    reserved = int(snapshot.reserved_bytes_at(request.event))
    refused = reserved + _segment_bytes(request.size_bytes)
    free = request.device_free_bytes
    if free is not None and reserved + free < refused:
        there = max(reserved + free, CHUNK_BYTES)
        return Capacity(there, there, "device")
    held = max(_peak_until(snapshot, request.event), CHUNK_BYTES)
    return Capacity(held, max(held, refused - 1), "limit")


def _peak_until(snapshot: Snapshot, event: int) -> int:
    events = [-1, *(each.event for each in snapshot.segment_events if each.event <= event)]
    return int(snapshot.reserved_bytes_at(np.array(events)).max())


def _segment_bytes(request_bytes: int) -> int:
    """Return what torch asks the driver for, to serve a request."""
    if request_bytes <= MIB:
        return 2 * MIB
    if request_bytes < 10 * MIB:
        return 20 * MIB
    return -(-request_bytes // (2 * MIB)) * 2 * MIB


def _fitting_hole(snapshot: Snapshot, request: FailedRequest | None) -> int:
    if request is None:
        return 0
    has_classes = snapshot.recorded_policy != "vramx"
    is_small = request.size_bytes <= MIB
    return max(
        (
            hole.size_bytes
            for hole in snapshot.holes_at(request.event)
            if (hole.stream, hole.pool) == (request.stream, request.pool)
            and (hole.is_small == is_small or not has_classes)
        ),
        default=0,
    )


def _cause(
    needed: int, fitting: int, largest: int, enough_from: int, capacity: Capacity | None
) -> str | None:
    if not needed or capacity is None:
        return None
    if fitting >= needed:
        return FITTING_BLOCK
    if largest >= needed:
        return ELSEWHERE
    if enough_from <= capacity.low_bytes:
        return FRAGMENTATION
    return UNDECIDED if enough_from <= capacity.high_bytes else SIZE


def _remedy(
    parts: Parts,
    policy: str,
    capacity: Capacity | None,
    is_recorded: bool,
    progress: Progress | None,
) -> Remedy:
    options, of_pools = ReplayOptions(progress=progress), parts.pool_bytes(policy)
    (free,) = replay(parts.outside, policy, min_capacity=True, options=options)
    needs = None if free.min_capacity_bytes is None else free.min_capacity_bytes + of_pools
    fits, expected = None, free.peak_reserved_bytes
    if capacity is not None:
        left = max(capacity.low_bytes - of_pools, CHUNK_BYTES)
        (limited,) = replay(parts.outside, policy, capacity=left, options=options)
        may_fit = needs is not None and needs <= capacity.high_bytes
        fits = True if not limited.oom else None if may_fit else False
        expected = expected if limited.oom else limited.peak_reserved_bytes
        if is_recorded and capacity.source != "given":
            fits = False  # whatever the replay says: it is what failed
    return Remedy(policy, fits, needs, free.peak_reserved_bytes + of_pools, expected + of_pools)


def _fidelity(
    snapshot: Snapshot, rows: Ids, capacity: Capacity | None, progress: Progress | None
) -> Fidelity:
    """Compare, allocation by allocation, what was taken from the driver with what was recorded."""
    trace, events = snapshot.trace.part(rows), snapshot.event[rows]
    compared = trace.op != FREE_REQUESTED  # the core has no event of these
    (result,) = replay(
        trace,
        snapshot.recorded_policy,
        capacity=capacity.low_bytes if capacity is not None else None,
        options=ReplayOptions(samples=int(compared.sum()), progress=progress),
    )
    events = events[compared]
    line = result.timeline
    replayed = line.reserved_bytes.astype(np.int64) if line is not None else np.zeros(0, np.int64)
    if trace.failed:  # what was given back for the request itself comes before its failure
        events = events[:-1]
    changes = np.array([each.event for each in snapshot.segment_events], np.int64)
    count = np.diff(np.searchsorted(changes, events, side="right"), prepend=0)
    change = np.diff(snapshot.reserved_bytes_at(events), prepend=snapshot.reserved_bytes_at(-1))
    known = min(len(replayed), len(events))
    same = np.diff(replayed[:known], prepend=0) == change[:known]
    peak = _peak_until(snapshot, int(events[-1])) if len(events) else 0
    return Fidelity(
        policy=snapshot.recorded_policy,
        reproduced=int(count[:known][same].sum()),
        recorded=int(count.sum()),
        peak_error=result.peak_reserved_bytes / peak - 1 if peak else None,
        unmodelled=_unmodelled(snapshot),
        fails_too=result.oom_as_recorded if trace.failed else None,
    )


def _unmodelled(snapshot: Snapshot) -> tuple[str, ...]:
    """Name what the models of torch's allocators leave out, where the recording has it."""
    settings = snapshot.settings
    divisions = settings.get("roundup_power2_divisions")
    is_rounded = isinstance(divisions, dict) and any(divisions.values())
    found = {
        "max_split_size": settings.get("max_split_size", -1) != -1,
        "garbage_collection_threshold": bool(settings.get("garbage_collection_threshold")),
        "roundup_power2_divisions": is_rounded,
        "memory pools": len(snapshot.allocations.pools) > 1,
        "where memory from before the recording lay": snapshot.live_bytes_at(-1) > 0,
    }
    unknown = (
        f"events of an action that is not known, {each}" for each in snapshot.unknown_actions
    )
    return (*(name for name, is_there in found.items() if is_there), *unknown)
