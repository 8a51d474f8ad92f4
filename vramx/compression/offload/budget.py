"""How many bytes of a step leave the device, from what earlier steps measured.

A step is what is put until all of it has been asked for again or dropped. A fraction is of the
bytes of the largest recent step, and the oldest of a step, which are needed last. "cpu" is as much
as the link carries while the device computes: bandwidth times the time of a pass, less what the
device waited for copies in it, where that was least of late (whatever disturbs a measurement makes
it longer); spread over the step, so that no more than that is under way at any time. Events give
the times; they are asked whether they are done, never waited for. Not thread-safe: the stash holds
its lock. A put costs about a microsecond here, an event more in the steps that are measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vramx.compression.offload.transport import Lane, Transport
from vramx.sizes import GIB, MIB

Share = str | float

# Of the bytes that would fit exactly: times differ from step to step.
_MARGIN = 0.95
# Copies of a step that are timed, and the least bytes that say something about bandwidth.
_TIMED_COPIES = 64
_TIMED_BYTES = 1 << 18
_RECENT_STEPS = 8
_RECENT_MEASURED_STEPS = 4
_UNREAD_STEPS = 4
# The first steps are measured, and then one of some.
_MEASURED_STEPS = 4
_MEASURED_EVERY = 8
# Puts and gets of a step that is measured, each an event.
_MOST_CALLS = 1 << 14
# What may be under way in each direction: this part of a step's bytes, about two layers of 32, and
# some tensors at least, so that the link never runs dry; within bounds.
_WINDOW_PART = 16
_WINDOW_TENSORS = 2
_SMALLEST_WINDOW_BYTES = 64 * MIB
_LARGEST_WINDOW_BYTES = 2 * GIB
_FIRST_WINDOW_BYTES = 256 * MIB


@dataclass
class _Record:
    """The events of one step, in the order in which they were recorded."""

    start: Any
    end: Any = None
    moved_bytes: int = 0
    offered_bytes: int = 0
    asked_bytes: int = 0
    copies: dict[Lane, list[tuple[Any, Any, int]]] = field(
        default_factory=lambda: {lane: [] for lane in Lane}
    )
    # Of a put: event, sequence, bytes; of a get None for the bytes.
    calls: list[tuple[Any, int, int | None]] = field(default_factory=list)
    # Events before and after a wait, and how many calls had begun.
    waits: list[tuple[Any, Any, int]] = field(default_factory=list)

    def last_events(self) -> Iterator[Any]:
        """Return those that are done only once all are, the last first.

        A step may run on several streams: `end` is on that of its last get.
        """
        yield self.end
        yield from (after for _, after, _ in reversed(self.waits))
        yield from (event for event, _, _ in reversed(self.calls))
        yield self.start
        for copies in self.copies.values():
            yield from (end for _, end, _ in copies)


class Moment(NamedTuple):
    """A put or a get of a step: how long the step had computed by then, waits not counted."""

    computed_ms: float
    sequence: int
    nbytes: int | None  # of a put


@dataclass(frozen=True)
class Measured:
    """What finished steps told; None where nothing has been measured yet.

    `forward_ms` and `backward_ms` are of the last one, without its waits; `waited_ms` are those.
    `asked_bytes` are what its backward asked for: less than was offered where it was broken off.
    """

    bytes_per_ms: dict[Lane, float] = field(default_factory=dict)
    forward_ms: float | None = None
    backward_ms: float | None = None
    waited_ms: float = 0.0
    moved_bytes: int = 0
    offered_bytes: int = 0
    asked_bytes: int = 0
    moments: tuple[Moment, ...] = ()

    def hidden_share(self) -> float | None:
        """The share of a step's bytes that the link carries both ways while the step computes."""
        if self.forward_ms is None or self.backward_ms is None or len(self.bytes_per_ms) < 2:
            return None
        to_host = self.bytes_per_ms[Lane.TO_HOST] * self.forward_ms
        to_device = self.bytes_per_ms[Lane.TO_DEVICE] * self.backward_ms
        return min(to_host / max(1, self.offered_bytes), to_device / max(1, self.asked_bytes))

    def hidden_part(self) -> float | None:
        """The part of the time of the last step's copies, both ways, that nothing waited for."""
        copy_ms = sum(self.moved_bytes / rate for rate in self.bytes_per_ms.values())
        return max(0.0, 1 - self.waited_ms / copy_ms) if copy_ms else None


class Budget:
    """Decides what leaves; told of every put, copy, wait and get."""

    def __init__(self, share: Share, transport: Transport, window_bytes: int | None = None) -> None:
        self._share = share
        self._transport = transport
        self._window_bytes = window_bytes
        self._totals: deque[int] = deque(maxlen=_RECENT_STEPS)
        self._hidden_shares: deque[float] = deque(maxlen=_RECENT_MEASURED_STEPS)
        self._unread: deque[_Record] = deque(maxlen=_UNREAD_STEPS)
        self._record: _Record | None = None  # of a step that is not measured there is none
        self._in_backward = False
        self._limit: float | None = None  # of this step, and the part of its bytes that it is
        self._density = 1.0
        self._left_bytes = 0
        self._asked_bytes = 0
        self._largest_bytes = 0
        self.step = 0
        self.outstanding = 0
        self.offered_bytes = 0
        self.measured = Measured()

    def put(self, nbytes: int, sequence: int) -> bool:
        """Begin a step where the last one is over; tell whether these bytes leave."""
        if self._is_over():
            self._begin()
        self._note(sequence, nbytes)
        leaves = self._admits(nbytes)
        self.offered_bytes += nbytes
        self.outstanding += 1
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if leaves:
            self._left_bytes += nbytes
        return leaves

    def get(self, step: int) -> None:
        """Note the first time that something of a step is asked for, or that it was dropped."""
        if step == self.step:
            self.outstanding -= 1

    def begin_get(self, step: int, sequence: int, gets: int, nbytes: int) -> None:
        """Note that something is asked for that had been asked for `gets` times before."""
        self._in_backward = True
        if step == self.step and gets == 0:
            self._asked_bytes += nbytes
            self._note(sequence, None)

    def end_get(self) -> None:
        if self._record is not None:
            self._record.end = self._mark()

    @property
    def measures(self) -> bool:
        """Whether waits of this step are to be timed; the events for it cost the host time."""
        return self._record is not None

    def times(self, lane: Lane, nbytes: int) -> bool:
        """Tell whether a copy is to be timed."""
        record = self._record
        return (
            record is not None
            and nbytes >= _TIMED_BYTES
            and len(record.copies[lane]) < _TIMED_COPIES
        )

    def copied(self, lane: Lane, start: Any, end: Any, nbytes: int) -> None:
        if self._record is not None:
            self._record.copies[lane].append((start, end, nbytes))

    def waited(self, before: Any, after: Any) -> None:
        """Note that a stream waited for a copy, for no time or for some."""
        record = self._record
        if record is not None:
            record.waits.append((before, after, len(record.calls)))

    def limit_bytes(self) -> float | None:
        """The bytes of a step that leave; None for all, as in the first step.

        The first step moves everything: running out of memory ends a program, a slow step does not.
        """
        if self._share == "cpu":
            if not self._hidden_shares:
                return None
            return _MARGIN * min(self._hidden_shares) * self.largest_step_bytes()
        share = float(self._share)
        return None if share >= 1 or not self._totals else share * max(self._totals)

    def largest_step_bytes(self) -> int:
        return max(self._totals, default=0)

    def window_bytes(self) -> int:
        """What may be under way in one direction."""
        if self._window_bytes is not None:
            return self._window_bytes
        part = self.largest_step_bytes() // _WINDOW_PART or _FIRST_WINDOW_BYTES
        wanted = max(_SMALLEST_WINDOW_BYTES, part, _WINDOW_TENSORS * self._largest_bytes)
        return min(wanted, _LARGEST_WINDOW_BYTES)

    def _admits(self, nbytes: int) -> bool:
        if self._limit is None:
            return True
        if self._share == "cpu":
            # Evenly, and always the first, so that there is something to measure.
            due = self._density * (self.offered_bytes + nbytes)
            return self._left_bytes + nbytes <= due or self.offered_bytes == 0
        return self.offered_bytes < self._limit

    def _is_over(self) -> bool:
        if self.outstanding == 0:
            return True
        # Somebody holds a part of an old graph: the step would never end.
        return self._in_backward and self.offered_bytes > 2 * self.largest_step_bytes() > 0

    def _begin(self) -> None:
        if self.step > 0:
            self._totals.append(self.offered_bytes)
        if self._record is not None and self._record.end is not None:
            self._record.moved_bytes = self._left_bytes
            self._record.offered_bytes = self.offered_bytes
            self._record.asked_bytes = self._asked_bytes
            self._unread.append(self._record)
        self._read()
        measures = self.step < _MEASURED_STEPS or self.step % _MEASURED_EVERY == 0
        self._record = _Record(self._mark()) if measures else None
        self._in_backward = False
        self.step += 1
        self.outstanding = 0
        self.offered_bytes = self._left_bytes = self._asked_bytes = 0
        self._limit = self.limit_bytes()
        if self._limit is not None and self._totals:
            self._density = self._limit / max(1, self.largest_step_bytes())

    def _note(self, sequence: int, nbytes: int | None) -> None:
        record = self._record
        if record is None:
            return
        if len(record.calls) == _MOST_CALLS:
            self._record = None  # no end in sight
            return
        record.calls.append((self._mark(), sequence, nbytes))

    def _mark(self) -> Any:
        return self._transport.mark(self._transport.stream(), timed=True)

    def _read(self) -> None:
        """Take the times of the steps that the device has finished."""
        done = self._transport.done
        while self._unread and all(map(done, self._unread[0].last_events())):
            self.measured = self._measure(self._unread.popleft())
            share = self.measured.hidden_share()
            # A small step, one of a few tensors, says nothing of a large one, and no more does one
            # whose backward ran out of memory: what leaves would be as little as it had time for.
            is_large = 2 * self.measured.asked_bytes >= self.largest_step_bytes()
            if share is not None and is_large:
                self._hidden_shares.append(share)

    def _measure(self, record: _Record) -> Measured:
        elapsed = self._transport.milliseconds
        rates = dict(self.measured.bytes_per_ms)
        for lane, copies in record.copies.items():
            milliseconds = sum(elapsed(start, end) for start, end, _ in copies)
            if milliseconds > 0:
                rates[lane] = sum(nbytes for _, _, nbytes in copies) / milliseconds
        waits = [(elapsed(before, after), calls) for before, after, calls in record.waits]
        waited_ms = sum(wait_ms for wait_ms, _ in waits)
        moments = tuple(self._moments(record, waits))
        step_ms = elapsed(record.start, record.end) - waited_ms
        forward_ms = next((m.computed_ms for m in moments if m.nbytes is None), step_ms)
        return Measured(
            bytes_per_ms=rates,
            forward_ms=forward_ms,
            backward_ms=max(0.0, step_ms - forward_ms),
            waited_ms=waited_ms,
            moved_bytes=record.moved_bytes,
            offered_bytes=record.offered_bytes,
            asked_bytes=record.asked_bytes,
            moments=moments,
        )

    def _moments(self, record: _Record, waits: list[tuple[float, int]]) -> Iterator[Moment]:
        position, waited_ms, computed_ms = 0, 0.0, 0.0
        for i, (event, sequence, nbytes) in enumerate(record.calls):
            while position < len(waits) and waits[position][1] <= i:
                waited_ms += waits[position][0]
                position += 1
            # Calls of other streams may lie before those that were asked for earlier.
            elapsed_ms = self._transport.milliseconds(record.start, event)
            computed_ms = max(computed_ms, elapsed_ms - waited_ms)
            yield Moment(computed_ms, sequence, nbytes)
