"""What a compression saw and kept, in numbers that are known on the host.

Counts only sizes, so that counting never waits for a device. Safe from any thread: a tensor is
noted without a lock, in a fifth of a microsecond, and the notes are summed, under one, when the
numbers are read or the notes are many. A program repeats itself, so that few of them differ.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vramx.sizes import format_size

# Operation, reason, and the bytes that were seen, kept and shared.
_Note = tuple[str, str, int, int, int]
# Summed at the latest when there are as many, which are half a megabyte.
_MOST_NOTES = 4096


@dataclass
class Tally:
    """Tensors and bytes of one kind: what torch would have kept of them, and what is kept."""

    tensors: int = 0
    seen_bytes: int = 0
    kept_bytes: int = 0

    def add(self, count: int, seen_bytes: int, kept_bytes: int) -> None:
        """Count tensors that are alike; the bytes are those of one."""
        self.tensors += count
        self.seen_bytes += count * seen_bytes
        self.kept_bytes += count * kept_bytes

    def include(self, other: Tally) -> None:
        """Count all that another one has."""
        self.tensors += other.tensors
        self.seen_bytes += other.seen_bytes
        self.kept_bytes += other.kept_bytes


@dataclass
class _Sums:
    """Everything that was counted, and summed."""

    tensors: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    shared_bytes: int = 0
    packed: Tally = field(default_factory=Tally)
    kept: dict[str, Tally] = field(default_factory=dict)
    operations: dict[str, Tally] = field(default_factory=dict)

    def add(self, note: _Note, count: int) -> None:
        operation, reason, seen_bytes, kept_bytes, shared_bytes = note
        self.tensors += count
        self.shared_bytes += count * shared_bytes
        tally = self.kept.setdefault(reason, Tally()) if reason else self.packed
        tally.add(count, seen_bytes, kept_bytes)
        if reason in _NOT_COUNTED:
            return
        self.saved_bytes += count * seen_bytes
        self.kept_bytes += count * kept_bytes
        self.operations.setdefault(operation, Tally()).add(count, seen_bytes, kept_bytes)

    def include(self, other: _Sums) -> None:
        """Add all of another's counts."""
        for name in ("tensors", "saved_bytes", "kept_bytes", "shared_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.packed.include(other.packed)
        for mine, others in ((self.kept, other.kept), (self.operations, other.operations)):
            for name, tally in others.items():
                mine.setdefault(name, Tally()).include(tally)


class CompressionStats:
    """What was saved for backward while compression was on, since it was made or reset.

    Attributes:
        tensors: saved tensors that were seen, parameters included.
        saved_bytes: what torch alone would have kept for them; memory that several of them share
            counts once, parameters, leaves and inputs not at all.
        kept_bytes: what is kept instead.
        shared_bytes: bytes of tensors that were found to be kept already, and cost nothing.
        packed: the tensors that were packed.
        kept: those that were kept as they are, by reason: small, integer, policy, statistic (a
            result much smaller than its argument), unknown (nothing is known of the operation's
            backward), derivative (a gradient of a gradient may read it), held (memory that another
            kept tensor holds), dtype, layout, subclass, device, leaf, input (data of the program's
            own that no gradient is asked of), parameter, disabled.
        operations: all but parameters, leaves and inputs, by operation.

    Sync: none. The numbers are sums over forward passes, not what is held now: divide by the steps.

    Example:
        >>> stats = CompressionStats()
        >>> stats.ratio, str(stats)
        (1.0, 'saved 0 B -> 0 B (1.00x); 0 % shared; params 0 B')
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = _Sums()
        self._notes: deque[_Note] = deque()  # its ends move by one operation, which is atomic

    @property
    def tensors(self) -> int:
        return self._summed().tensors

    @property
    def saved_bytes(self) -> int:
        return self._summed().saved_bytes

    @property
    def kept_bytes(self) -> int:
        return self._summed().kept_bytes

    @property
    def shared_bytes(self) -> int:
        return self._summed().shared_bytes

    @property
    def packed(self) -> Tally:
        return self._summed().packed

    @property
    def kept(self) -> dict[str, Tally]:
        return self._summed().kept

    @property
    def operations(self) -> dict[str, Tally]:
        return self._summed().operations

    @property
    def ratio(self) -> float:
        """How many times smaller the kept bytes are; 1.0 where nothing was saved."""
        return self.saved_bytes / self.kept_bytes if self.kept_bytes else 1.0

    def record(
        self,
        operation: str,
        reason: str,
        seen_bytes: int,
        kept_bytes: int,
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Count one saved tensor; `reason` is empty where it is packed.

        `seen_bytes` is what torch would keep for this tensor alone, 0 where the memory was counted.

        Example:
            >>> stats = CompressionStats()
            >>> stats.record("linear", "", 200, 100)
            >>> stats.ratio
            2.0
        """
        notes = self._notes
        notes.append((operation, reason, seen_bytes, kept_bytes, shared_bytes))
        if len(notes) >= _MOST_NOTES:
            self._summed()

    def _summed(self) -> _Sums:
        """Return the sums, with every note that was made so far."""
        notes = self._notes
        if notes:
            with self._lock:
                found = Counter([notes.popleft() for _ in range(len(notes))])
                for note, count in found.items():
                    self._sums.add(note, count)
        return self._sums

    @classmethod
    def sum(cls, several: Iterable[CompressionStats]) -> CompressionStats:
        """Return the sum of several as they are now.

        Example:
            >>> CompressionStats.sum([CompressionStats()]) == CompressionStats()
            True
        """
        made = cls()
        for stats in several:
            made._sums.include(stats._summed())
        return made

    def reset(self) -> None:
        """Start all counts anew.

        Example:
            >>> CompressionStats().reset()
        """
        with self._lock:
            self._notes.clear()
            self._sums = _Sums()

    def __repr__(self) -> str:
        return f"CompressionStats({self})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompressionStats):
            return NotImplemented
        return self._summed() == other._summed()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> _Sums:
        return self._summed()

    def __setstate__(self, sums: _Sums) -> None:
        self.__init__()  # type: ignore[misc]
        self._sums = sums

    def __str__(self) -> str:
        everything = self.saved_bytes + self.shared_bytes
        share = 100 * self.shared_bytes / everything if everything else 0.0
        parts = [self._saved(), f"{share:.0f} % shared", *self._kept()]
        parts.append(f"params {format_size(self.kept.get('parameter', Tally()).seen_bytes)}")
        return "; ".join(parts)

    def brief(self, *, reasons: bool) -> str:
        """Return what was saved and is kept, and with `reasons` why some is as it is.

        Example:
            >>> stats = CompressionStats()
            >>> stats.record("linear", "dtype", 200, 200)
            >>> stats.brief(reasons=True)
            'saved 200 B -> 200 B (1.00x); kept: dtype 200 B'
        """
        return "; ".join([self._saved(), *(self._kept() if reasons else ())])

    def _saved(self) -> str:
        saved, kept = format_size(self.saved_bytes), format_size(self.kept_bytes)
        return f"saved {saved} -> {kept} ({self.ratio:.2f}x)"

    def _kept(self) -> list[str]:
        kept = [
            f"{reason} {format_size(tally.kept_bytes)}"
            for reason, tally in self._kept_by_size()
            if reason not in _NOT_COUNTED and tally.kept_bytes
        ]
        return ["kept: " + ", ".join(kept)] if kept else []

    def table(self) -> str:
        """Return the counts by operation and by reason as lines of text.

        Example:
            >>> stats = CompressionStats()
            >>> stats.record("linear", "", 200, 100)
            >>> print(stats.table())
            operation             tensors        saved         kept
            linear                      1        200 B        100 B
            <BLANKLINE>
            kept as it is         tensors        saved         kept
        """
        operations = sorted(self.operations.items(), key=lambda item: -item[1].seen_bytes)
        lines = [_HEAD.format("operation"), *_rows(operations), ""]
        lines += [_HEAD.format("kept as it is"), *_rows(self._kept_by_size())]
        return "\n".join(lines)

    def _kept_by_size(self) -> list[tuple[str, Tally]]:
        return sorted(self.kept.items(), key=lambda item: -item[1].seen_bytes)


# Memory that lives in any case: neither saved by torch nor kept by us.
_NOT_COUNTED = frozenset({"parameter", "leaf", "input"})
_HEAD = "{:<20}  tensors        saved         kept"


def _rows(tallies: list[tuple[str, Tally]]) -> Iterator[str]:
    for name, tally in tallies:
        seen, kept = format_size(tally.seen_bytes), format_size(tally.kept_bytes)
        yield f"{name[:20]:<20}  {tally.tensors:>7}  {seen:>11}  {kept:>11}"
