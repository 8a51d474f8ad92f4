"""A gate for continuous integration: a run's figures beside a limit, or beside those kept before.

A baseline is a small JSON file, meant to be committed: the figures of a run, and the stacks that
held the most at its peak, so that a check that fails can name what grew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vramx.errors import TraceError
from vramx.memory.holders import holders
from vramx.memory.snapshot import Snapshot

SCHEMA = 1
FIGURES = ("peak_live_bytes", "peak_reserved_bytes", "failed_requests")
_MOST_STACKS = 100
_MOST_BYTES = 1 << 20  # of a baseline; one with a hundred stacks has 20 KB


@dataclass(frozen=True)
class Measured:
    """The figures of one run, as they stand in a baseline."""

    peak_live_bytes: int
    peak_reserved_bytes: int
    failed_requests: int
    stacks: Mapping[str, int]  # bytes at the peak, the largest first

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the keys of a baseline."""
        figures = {name: getattr(self, name) for name in FIGURES}
        return {"schema": SCHEMA, **figures, "stacks": dict(self.stacks)}


@dataclass(frozen=True)
class Verdict:
    """One figure beside what is accepted for it."""

    figure: str
    value: int
    expected: int  # by the baseline, or the limit
    accepted: int  # with the tolerance

    @property
    def ok(self) -> bool:
        """Whether the figure is accepted."""
        return self.value <= self.accepted

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the keys of the JSON report."""
        return {**asdict(self), "ok": self.ok}


def measure(snapshot: Snapshot) -> Measured:
    """Return the figures of a snapshot that a check looks at.

    Example:
        >>> measure(vramx.Snapshot.load("train.pickle")).peak_reserved_bytes     # doctest: +SKIP
        1396703232
    """
    largest: dict[str, int] = {}
    for holder in holders(snapshot, snapshot.peak_event):
        largest[holder.name] = largest.get(holder.name, 0) + holder.bytes
    return Measured(
        peak_live_bytes=snapshot.live_bytes_at(snapshot.peak_event),
        peak_reserved_bytes=snapshot.peak_reserved_bytes,
        failed_requests=len(snapshot.failures),
        stacks=dict(list(largest.items())[:_MOST_STACKS]),
    )


def read_baseline(path: Path) -> Measured:
    """Read what `Measured.to_dict` wrote as JSON.

    Raises:
        TraceError: the file cannot be read, or is no baseline.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TraceError(f"cannot be read: {reason}") from None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise TraceError("it is no JSON; a baseline that --update wrote is accepted") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise TraceError(f"it is no baseline of schema {SCHEMA}; --update writes one")
    stacks = document.get("stacks")
    stacks = stacks if isinstance(stacks, dict) else {}
    return Measured(
        **{name: _count(document.get(name), name) for name in FIGURES},
        stacks={name: _count(size, "a stack") for name, size in stacks.items()},
    )


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TraceError(f"{name} is {repr(value)[:40]}; a number from 0 on is accepted")
    return value


def check_baseline(measured: Measured, baseline: Measured, tolerance: float) -> list[Verdict]:
    """Return a verdict on each figure; failed requests have no tolerance.

    Args:
        tolerance: the share by which a peak may exceed the baseline's, as 0.02 for 2 %.
    """
    verdicts = []
    for name in FIGURES:
        expected = getattr(baseline, name)
        share = 0.0 if name == "failed_requests" else tolerance
        accepted = int(expected * (1 + share))
        verdicts.append(Verdict(name, getattr(measured, name), expected, accepted))
    return verdicts


def check_limit(measured: Measured, limit_bytes: int) -> list[Verdict]:
    """Return verdicts on what a device of that size must have: room for all, and none refused."""
    return [
        Verdict("peak_reserved_bytes", measured.peak_reserved_bytes, limit_bytes, limit_bytes),
        Verdict("failed_requests", measured.failed_requests, 0, 0),
    ]


def grown_most(measured: Measured, baseline: Measured) -> tuple[str, int] | None:
    """Return the stack that holds more than before at the peak, and by how much."""
    grown = {name: size - baseline.stacks.get(name, 0) for name, size in measured.stacks.items()}
    name = max(grown, key=lambda each: grown[each], default=None)
    return (name, grown[name]) if name is not None and grown[name] > 0 else None
