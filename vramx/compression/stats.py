"""What a compression saw and kept, in numbers that are known on the host.

Counts only sizes, so that counting never waits for a device. Safe from any thread: one lock, held
for a few additions. A tensor costs about half a microsecond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from vramx.sizes import format_size


@dataclass
class Tally:
    """Tensors and bytes of one kind: what torch would have kept of them, and what is kept."""

    tensors: int = 0
    seen_bytes: int = 0
    kept_bytes: int = 0

    def add(self, seen_bytes: int, kept_bytes: int) -> None:
        self.tensors += 1
        self.seen_bytes += seen_bytes
        self.kept_bytes += kept_bytes


@dataclass
class CompressionStats:
    """What was saved for backward while compression was on, since it was made or reset.

    Attributes:
        tensors: saved tensors that were seen, parameters included.
        saved_bytes: what torch alone would have kept for them; memory that several of them share
            counts once, parameters and leaves not at all.
        kept_bytes: what is kept instead.
        shared_bytes: bytes of tensors that were found to be kept already, and cost nothing.
        packed: the tensors that were packed.
        kept: those that were kept as they are, by reason: small, integer, policy, statistic (a
            result much smaller than its argument), held (memory that another kept tensor holds),
            dtype, layout, subclass, device, leaf, parameter, disabled.
        operations: all but parameters and leaves, by operation.

    Sync: none. The numbers are sums over forward passes, not what is held now: divide by the steps.

    Example:
        >>> stats = CompressionStats()
        >>> stats.ratio, str(stats)
        (1.0, 'saved 0 B -> 0 B (1.00x); 0 % shared; params 0 B')
    """

    tensors: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    shared_bytes: int = 0
    packed: Tally = field(default_factory=Tally)
    kept: dict[str, Tally] = field(default_factory=dict)
    operations: dict[str, Tally] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

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
        with self._lock:
            self.tensors += 1
            self.shared_bytes += shared_bytes
            tally = self.kept.setdefault(reason, Tally()) if reason else self.packed
            tally.add(seen_bytes, kept_bytes)
            if reason in _NOT_COUNTED:
                return
            self.saved_bytes += seen_bytes
            self.kept_bytes += kept_bytes
            self.operations.setdefault(operation, Tally()).add(seen_bytes, kept_bytes)

    def reset(self) -> None:
        """Start all counts anew.

        Example:
            >>> CompressionStats(tensors=3).reset()
        """
        with self._lock:
            self.tensors = self.saved_bytes = self.kept_bytes = self.shared_bytes = 0
            self.packed = Tally()
            self.kept = {}
            self.operations = {}

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __str__(self) -> str:
        everything = self.saved_bytes + self.shared_bytes
        share = 100 * self.shared_bytes / everything if everything else 0.0
        parts = [
            f"saved {format_size(self.saved_bytes)} -> {format_size(self.kept_bytes)} "
            f"({self.ratio:.2f}x)",
            f"{share:.0f} % shared",
        ]
        kept = [
            f"{reason} {format_size(tally.kept_bytes)}"
            for reason, tally in self._kept_by_size()
            if reason not in _NOT_COUNTED and tally.kept_bytes
        ]
        if kept:
            parts.append("kept: " + ", ".join(kept))
        parts.append(f"params {format_size(self.kept.get('parameter', Tally()).seen_bytes)}")
        return "; ".join(parts)

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
        with self._lock:
            return sorted(self.kept.items(), key=lambda item: -item[1].seen_bytes)


# Memory that lives in any case: neither saved by torch nor kept by us.
_NOT_COUNTED = frozenset({"parameter", "leaf"})
_HEAD = "{:<20}  tensors        saved         kept"


def _rows(tallies: list[tuple[str, Tally]]) -> Iterator[str]:
    for name, tally in tallies:
        seen, kept = format_size(tally.seen_bytes), format_size(tally.kept_bytes)
        yield f"{name[:20]:<20}  {tally.tensors:>7}  {seen:>11}  {kept:>11}"
