"""Buffers to pinned host memory during forward, and back before backward needs them.

A Stash takes buffers and returns tickets; what is in a buffer is not its business. budget.py
decides what leaves, pinned.py where it lies, transport.py moves it; parcel.py has the states that a
buffer goes through.

The host never waits. What keeps that safe is order on the device:
    copy out   after the work that wrote the buffer
    free       by having the buffer's own stream wait for the copy out: memory goes back to the
               allocator in the order of that stream
    copy back  after the copy out, and after whatever had the new memory before
    get        the caller's stream waits for the copy back
    reuse      of host memory: its next copy out comes after the last copy back from it

Thread-safe: one lock a device. A ticket that dies frees what stayed on the device, and of the rest
leaves a note only, so that the collector may run at any time. Of host time a buffer that stays
costs some microseconds, one that leaves and comes back 0.15 ms, most of it in CUDA's calls
(measured on the host of an H200).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from typing import Any

from torch import Tensor

from vramx.compression import packs
from vramx.compression.offload.budget import Budget, Share
from vramx.compression.offload.parcel import Parcel, State
from vramx.compression.offload.pinned import HostPool, Slot
from vramx.compression.offload.transport import Lane, Transport
from vramx.compression.saved import check_version
from vramx.errors import ModifiedInPlaceError, OffloadError, warn_once
from vramx.sizes import format_size

# How many parcels a prefetch looks at, and how many dead ones the order may have.
_LOOK_AHEAD = 256
_DEAD_PARCELS = 64


class Ticket:
    """Stands for a buffer in a stash, which takes the memory back when the ticket dies."""

    __slots__ = ("__weakref__", "_parcel", "_stash")

    def __init__(self, stash: Stash, parcel: Parcel) -> None:
        self._stash = stash
        self._parcel = parcel

    @property
    def nbytes(self) -> int:
        return self._parcel.nbytes

    def get(self) -> Tensor:
        """Return the buffer on the device, safe to read on the current stream; as often as wanted.

        Sync: none; the current stream waits.

        Raises:
            OffloadError: it is on the host, and the current stream is being captured.
            ModifiedInPlaceError: it was changed in place before it had been copied.
        """
        return self._stash.fetch(self._parcel)

    def __del__(self) -> None:
        # Any thread, any moment, within the stash's own lock too: an append, and what was never to
        # be copied is freed like any tensor. Where it lies for good nobody else looks at it.
        if not self._parcel.slots:
            self._parcel.buffer = None
        self._stash.dropped.append(self._parcel)


class Stash:
    """The buffers of one device that are offloaded by one rule.

    Args:
        share: "cpu" or a fraction; see budget.py.
        transport: moves them.
        pool: where they lie on the host.
        lock: guards the pool; shared by all stashes of the pool.
        window_bytes: what may be under way in each direction; None: as much as fits the step.
    """

    def __init__(
        self,
        share: Share,
        transport: Transport,
        pool: HostPool,
        lock: threading.Lock | None = None,
        window_bytes: int | None = None,
    ) -> None:
        self.share = share
        self.budget = Budget(share, transport, window_bytes)
        self.dropped: deque[Parcel] = deque()
        self.moved_bytes = self.returned_bytes = self.kept_bytes = 0
        self.captured = self.refused = 0
        self._transport = transport
        self._pool = pool
        self._lock = threading.Lock() if lock is None else lock
        self._sequence = 0
        # Parcels with a slot, by sequence; of those, what is under way.
        self._order: list[Parcel] = []
        self._dead_count = 0
        self._leaving: OrderedDict[int, Parcel] = OrderedDict()
        self._leaving_bytes = 0
        self._coming_bytes = 0
        self._host_was_read = False

    def put(self, buffer: Tensor) -> Ticket:
        """Take a 1-D uint8 buffer that is not written again; it may leave the device."""
        parcel = Parcel(buffer)
        ticket = Ticket(self, parcel)  # which takes back what is counted here, should a copy fail
        with self._lock:
            if self._transport.capturing():
                # A replay would copy to host memory that belongs to another by then.
                self.captured += 1
                return ticket
            self._collect()
            self._sequence += 1
            parcel.sequence = self._sequence
            leaves = self.budget.put(parcel.nbytes, parcel.sequence)
            parcel.step = self.budget.step
            slots = self._pool.take_parts(parcel.nbytes) if leaves else ()
            if slots:
                self._send(parcel, slots)
            else:
                self.kept_bytes += parcel.nbytes
                self.refused += slots is None
        if slots is None:
            warn_once(
                f"offload: the host has no more pinned memory than {format_size(self.host_bytes)} "
                "(half of what this process has of it is used at most): what comes beyond that "
                "stays on the device",
                about="pinned memory",
            )
        return ticket

    def fetch(self, parcel: Parcel) -> Tensor:
        """Return a parcel's buffer; see Ticket.get."""
        with self._lock:
            if self._transport.capturing():
                return self._fetch_under_capture(parcel)
            self._collect()
            self.budget.begin_get(parcel.step, parcel.sequence, parcel.gets, parcel.nbytes)
            if parcel.gets == 0:
                self.budget.get(parcel.step)
            parcel.gets += 1
            buffer = self._arrive(parcel)
            self._prefetch(parcel)
            self.budget.end_get()
            return buffer

    def _fetch_under_capture(self, parcel: Parcel) -> Tensor:
        if parcel.state in (State.AWAY, State.COMING):
            raise OffloadError(
                "a saved tensor was offloaded by a forward pass that was not captured, and is "
                "needed under capture; capture both passes, or pass offload=None"
            )
        assert parcel.buffer is not None
        return self._on_device(parcel, parcel.buffer)

    def _arrive(self, parcel: Parcel) -> Tensor:
        if parcel.spoiled:
            raise ModifiedInPlaceError(
                f"a saved tensor of {parcel.nbytes} bytes was modified by an inplace operation "
                "while it was being copied to the host"
            )
        if parcel.state in (State.AWAY, State.COMING):
            return self._take(parcel)
        assert parcel.buffer is not None
        return self._on_device(parcel, parcel.buffer)

    def collect(self) -> None:
        """Take back the memory of tickets that died; put() and get() do so too."""
        with self._lock:
            if not self._transport.capturing():
                self._collect()

    def check(self) -> None:
        """Name the first violated equation.

        bytes of the live parcels that are LEAVING == leaving_bytes; that are COMING ==
        coming_bytes; a parcel has a buffer unless it is AWAY; a live one in the order has a slot;
        sequences rise; those that are LEAVING are all that wait to be freed; the pool's own.
        """
        with self._lock:
            live = [parcel for parcel in self._order if not parcel.dead]
            by_state = {state: [p for p in live if p.state is state] for state in State}
            for state, nbytes in (
                (State.LEAVING, self._leaving_bytes),
                (State.COMING, self._coming_bytes),
            ):
                found = sum(p.nbytes for p in by_state[state])
                assert found == nbytes, f"{state}: {found} bytes, counted {nbytes}"
            assert all((p.buffer is None) == (p.state is State.AWAY) for p in live), "buffers"
            assert all(p.slots for p in live), "slots"
            numbers = [p.sequence for p in self._order]
            assert numbers == sorted(set(numbers)), f"sequences {numbers}"
            assert list(self._leaving.values()) == by_state[State.LEAVING], "what is leaving"
            assert len(self._order) - len(live) == self._dead_count, "dead parcels"
            self._pool.check()

    @property
    def host_bytes(self) -> int:
        return self._pool.held_bytes

    # -- To the host ------------------------------------------------------------------------------

    def _send(self, parcel: Parcel, slots: tuple[Slot, ...]) -> None:
        transport = self._transport
        assert parcel.buffer is not None
        parcel.stream = transport.stream()
        try:
            transport.wait(Lane.TO_HOST, transport.mark(parcel.stream))
            if self._host_was_read:
                transport.wait(Lane.TO_HOST, transport.mark(Lane.TO_DEVICE))
                self._host_was_read = False
            parcel.event = self._copy(Lane.TO_HOST, parcel.buffer, slots)
        except BaseException:
            self._give_back(slots)
            raise
        parcel.slots, parcel.state = slots, State.LEAVING
        self.moved_bytes += parcel.nbytes
        self._order.append(parcel)
        self._leaving[parcel.sequence] = parcel
        self._leaving_bytes += parcel.nbytes
        while self._leaving_bytes > self.budget.window_bytes():
            self._free_oldest()

    def _free_oldest(self) -> None:
        sequence, parcel = next(iter(self._leaving.items()))
        self._wait_for_copy(parcel.stream, parcel)
        del self._leaving[sequence]
        assert parcel.buffer is not None
        parcel.spoiled = parcel.buffer._version != parcel.version
        parcel.buffer, parcel.state = None, State.AWAY
        self._leaving_bytes -= parcel.nbytes

    def _copy(self, lane: Lane, buffer: Tensor, slots: tuple[Slot, ...]) -> Any:
        """Ask for the copies between a buffer and its slots; return the event of their end."""
        transport, nbytes = self._transport, buffer.numel()
        start = transport.mark(lane, timed=True) if self.budget.times(lane, nbytes) else None
        parts = [slot.memory for slot in slots]
        pieces = buffer.split([part.numel() for part in parts]) if len(parts) > 1 else (buffer,)
        for piece, part in zip(pieces, parts, strict=True):
            pair = (part, piece) if lane is Lane.TO_HOST else (piece, part)
            transport.copy(lane, *pair)
        end = transport.mark(lane, timed=start is not None)
        if start is not None:
            self.budget.copied(lane, start, end, nbytes)
        return end

    def _wait_for_copy(self, stream: Any, parcel: Parcel) -> None:
        transport = self._transport
        if transport.done(parcel.event):
            return
        if not self.budget.measures:
            transport.wait(stream, parcel.event)
            return
        before = transport.mark(stream, timed=True)
        transport.wait(stream, parcel.event)
        self.budget.waited(before, transport.mark(stream, timed=True))

    # -- Back to the device -----------------------------------------------------------------------

    def _on_device(self, parcel: Parcel, buffer: Tensor) -> Tensor:
        """Return a buffer that the device has, made safe for the stream that asks."""
        check_version(buffer, parcel.version)
        stream = self._transport.stream()
        if parcel.stream is not None and stream != parcel.stream:
            # After a copy from it, or to it, it has been written.
            self._wait_for_copy(stream, parcel)
            self._transport.used_by(buffer, stream)
        return buffer

    def _bring(self, parcel: Parcel) -> None:
        """Start the copy back, into memory of the current stream."""
        transport = self._transport
        buffer = packs.made(transport.allocate(parcel.nbytes))
        left, parcel.stream = parcel.stream, transport.stream()
        transport.wait(Lane.TO_DEVICE, transport.mark(parcel.stream))
        if parcel.stream != left:  # which waited for the copy out when the buffer was freed
            transport.wait(Lane.TO_DEVICE, parcel.event)
        parcel.event = self._copy(Lane.TO_DEVICE, buffer, parcel.slots)
        parcel.buffer, parcel.state = buffer, State.COMING
        parcel.version = buffer._version
        self.returned_bytes += parcel.nbytes
        self._coming_bytes += parcel.nbytes

    def _take(self, parcel: Parcel) -> Tensor:
        """Hand out the buffer when it has come; whoever gets it owns it."""
        if parcel.state is State.AWAY:
            self._bring(parcel)
        assert parcel.buffer is not None
        if parcel.stream == self._transport.stream():
            self._wait_for_copy(parcel.stream, parcel)
        buffer = self._on_device(parcel, parcel.buffer)
        parcel.buffer, parcel.state = None, State.AWAY
        self._coming_bytes -= parcel.nbytes
        return buffer

    def _prefetch(self, parcel: Parcel) -> None:
        """Start copies of what was put before: backward asks in the reverse order.

        What is still leaving counts as well, so that backward, which begins where memory is at its
        peak, holds a window once and not twice; but one copy may always be under way.
        """
        position = bisect_left(self._order, parcel.sequence, key=lambda p: p.sequence)
        for before in reversed(self._order[max(0, position - _LOOK_AHEAD) : position]):
            if before.dead or before.state is not State.AWAY or before.spoiled:
                continue
            if before.gets >= parcel.gets:
                continue  # this backward has had it
            under_way = before.nbytes + self._coming_bytes
            under_way += self._leaving_bytes if self._coming_bytes else 0
            if under_way > self.budget.window_bytes():
                return
            self._bring(before)

    # -- The end ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        while self.dropped:
            parcel = self.dropped[0]
            if parcel.slots:
                self._retire(parcel)
            if parcel.gets == 0:
                self.budget.get(parcel.step)
            self.dropped.popleft()
        while self._order and self._order[-1].dead:
            self._order.pop()
            self._dead_count -= 1
        if self._dead_count > _DEAD_PARCELS + len(self._order) // 2:
            self._order = [parcel for parcel in self._order if not parcel.dead]
            self._dead_count = 0

    def _retire(self, parcel: Parcel) -> None:
        """Free a dead parcel's memory, the device's in the order of its stream."""
        if parcel.buffer is not None:
            self._wait_for_copy(parcel.stream, parcel)
        if parcel.state is State.LEAVING:
            # A step that is smaller than the window never comes to free it.
            del self._leaving[parcel.sequence]
            self._leaving_bytes -= parcel.nbytes
        elif parcel.state is State.COMING:
            self._coming_bytes -= parcel.nbytes
        slots, parcel.slots = parcel.slots, ()
        parcel.buffer, parcel.state, parcel.dead = None, State.AWAY, True
        self._dead_count += 1
        # Copies out run in their order, so only copies back must be over before the next use.
        self._host_was_read = True
        self._give_back(slots)

    def _give_back(self, slots: tuple[Slot, ...]) -> None:
        for slot in slots:
            self._pool.give_back(slot)
