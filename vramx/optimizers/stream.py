"""States that go through a device around the step of their bucket, both directions at once.

Three slots of the device, each as large as the largest bucket's states:

    to the device   | 0 | 1 | 2 | 3 | 4 |           a bucket comes when its slot is empty,
    step                | 0 | 1 | 2 | 3 | 4 |       is stepped when it is there,
    to the host             | 0 | 1 | 2 | 3 | 4 |   and leaves when that is done

The states of the first buckets may stay on the device, as far as there is room for them: backward
comes to their parameters last, when nothing is left to hide a copy behind. All of it is ordered on
the device; the host waits only in settle() and undo(). The slots are there from the first bucket
that comes to close(). After an error the bucket that was being stepped leaves as it is then, and
the others have never left the host. Not thread-safe, but the pool's lock is held where the pool is
used.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vramx.compression.offload.offload import Link
from vramx.compression.offload.pinned import Slot
from vramx.compression.offload.transport import Lane
from vramx.errors import VramxWarning
from vramx.optimizers.slots import SLOTS, Berth, Slots
from vramx.optimizers.states import Bucket, Shown, States, is_dense, show, size_bytes


@dataclass(eq=False)
class _Rest:
    """Where a bucket's states are between steps; the slot goes back to the pool with it.

    Whatever is still being copied there is done before anyone else's copy, which is in the same
    lane. Without a slot they are on the device.
    """

    slot: Slot | None
    image: list[Shown]
    arrived: Any  # an event: all of them are there


class StateStream:
    """The buckets of one device.

    Args:
        link: to its host; its pool is used under its lock.
        bucket_bytes: of parameters that are stepped together; one that is larger is alone.
        least_bytes: a state tensor below this stays on the device.
        keep_bytes: of the first buckets' states, which stay there as well.
    """

    def __init__(
        self, device: torch.device, link: Link, bucket_bytes: int, least_bytes: int, keep_bytes: int
    ) -> None:
        self._device, self._link = device, link.transport
        self._pool, self._lock = link.pool, link.lock
        self._bucket_bytes, self._least_bytes = bucket_bytes, least_bytes
        self._keep_bytes = keep_bytes
        self.buckets: list[Bucket] = []
        self._rests: dict[int, _Rest] = {}  # by the bucket's number
        self._slots = Slots(link.transport)
        self._told: set[str] = set()

    @property
    def pinned_bytes(self) -> int:
        """What the states take of the host."""
        return sum(rest.slot.size_bytes for rest in self._rests.values() if rest.slot is not None)

    @property
    def kept_bytes(self) -> int:
        """What the states that stay take of the device."""
        return sum(self.buckets[n].nbytes for n, rest in self._rests.items() if rest.slot is None)

    @property
    def device_bytes(self) -> int:
        """What the slots take of the device, while there are any."""
        sizes = (self.buckets[n].nbytes for n, rest in self._rests.items() if rest.slot is not None)
        return SLOTS * max(sizes, default=0)

    def add(self, parameters: Sequence[Tensor]) -> list[int]:
        """Divide more parameters into buckets, those that are empty first; return their numbers."""
        empty = [number for number, bucket in enumerate(self.buckets) if not bucket.parameters]
        filled, numbers = 0, list[int]()
        for parameter in parameters:
            nbytes = size_bytes(parameter)
            if not numbers or filled + nbytes > self._bucket_bytes:
                if not empty:
                    empty.append(len(self.buckets))
                    self.buckets.append(Bucket([]))
                numbers.append(empty.pop(0))
                filled = 0
            self.buckets[numbers[-1]].parameters.append(parameter)
            filled += nbytes
        return numbers

    def step(
        self, number: int, state: States, run: Callable[[Bucket], None], ahead: Sequence[int] = ()
    ) -> None:
        """Step a bucket, by its number; `run` does that.

        `ahead` are those that are stepped next, if all goes well: these come meanwhile.
        """
        rest = self._rests.get(number)
        if rest is not None and not self.buckets[number].is_shown(state, rest.image):
            self.adopt_one(number, state)  # others have changed what the optimizer has
        self._bring(number)
        berth = self._slots.take(number)
        self.bring(ahead[: SLOTS - 1])
        bucket = self.buckets[number]
        if berth is None:
            run(bucket)
            rest = self._rests.get(number)
            if rest is None or not bucket.is_shown(state, rest.image):
                self._place(number, state)
            return
        layout, image = berth.images.get(number, (None, []))
        if layout is not bucket.layout:
            image = bucket.image(berth.memory)
            berth.images[number] = bucket.layout, image
        show(image)
        try:
            run(bucket)
        finally:
            self._send(number, state, berth, image)

    def bring(self, numbers: Sequence[int]) -> None:
        """Have the first of some buckets come, which are stepped next if all goes well."""
        for number in numbers[:SLOTS]:
            self._bring(number)

    def turn_away(self) -> None:
        """Have no bucket come any more: others may change its states now."""
        self._slots.turn_away()

    def close(self) -> None:
        """Let go of the slots."""
        self._slots.close()

    def adopt(self, state: States, *, is_anywhere: bool) -> None:
        """Put the optimizer's states on the host: those of the device, or all, as after loading."""
        self.close()
        self.settle()
        before = dict(self._rests)  # what is loaded may be views of it
        for number in range(len(self.buckets)):
            self._place(number, state, is_anywhere=is_anywhere)
        if before:
            self.settle()

    def keep(self, nbytes: int, state: States) -> None:
        """Have other states stay on the device from now on, as many as so many bytes hold."""
        self.close()
        self._keep_bytes = nbytes
        there = {number: rest.slot is None for number, rest in self._rests.items()}
        changes = [number for number, stays in there.items() if self._stays(number) != stays]
        for number in sorted(changes, key=lambda number: not there[number]):  # they make room
            if not there[number]:
                self._bring_back(number)
            self._place(number, state)

    def adopt_one(self, number: int, state: States) -> None:
        """Put a bucket's states, wherever they are, on the host in place of those that were."""
        self._slots.let_go(number)
        before = self._rests.get(number)  # what there is now may be views of it
        if before is not None:
            self._link.synchronize(before.arrived)
        self._place(number, state, is_anywhere=True)
        after = self._rests.get(number)
        if after is not None:
            self._link.synchronize(after.arrived)

    def remove(self, gone: Collection[Tensor]) -> None:
        """Forget parameters that have no states any more."""
        for number, bucket in enumerate(self.buckets):
            left = [p for p in bucket.parameters if p not in gone]
            if len(left) < len(bucket.parameters):
                bucket.parameters[:] = left
            if not left:
                self._slots.let_go(number)
                self._rests.pop(number, None)
                self.buckets[number] = Bucket([])

    def settle(self) -> None:
        """Wait, on the host, until what is at rest is what was computed."""
        for rest in self._rests.values():
            self._link.synchronize(rest.arrived)

    def undo(self) -> None:
        """Bring all states back to the device, for good."""
        self.close()
        for number in self._rests:
            self._bring_back(number)
        self._rests.clear()

    # -- one bucket -------------------------------------------------------------------------------

    def _bring_back(self, number: int) -> None:
        """Show a bucket's states on the device, each in memory of its own."""
        bucket, rest = self.buckets[number], self._rests[number]
        image = bucket.image_apart(self._link.allocate)
        self._link.wait(Lane.TO_DEVICE, self._link.mark(self._link.stream()))
        self._link.wait(Lane.TO_DEVICE, rest.arrived)
        for source, target in zip(bucket.moving(rest.image), bucket.moving(image), strict=True):
            self._link.copy(Lane.TO_DEVICE, target, source)
        arrived = self._link.mark(Lane.TO_DEVICE)
        self._link.wait(self._link.stream(), arrived)
        show(image)
        self._link.synchronize(arrived)

    def _stays(self, number: int) -> bool:
        """Tell whether a bucket's states are among the first that there is room for.

        As long as those of the buckets before it are unknown they count as if they were as large
        for their parameters as these.
        """
        own = self.buckets[number]
        share = own.nbytes / max(own.parameter_bytes, 1)
        first = sum(
            self.buckets[n].nbytes if n in self._rests else share * self.buckets[n].parameter_bytes
            for n in range(number)
        )
        kept = self.kept_bytes
        if number in self._rests and self._rests[number].slot is None:
            kept -= own.nbytes
        return max(first, kept) + own.nbytes <= self._keep_bytes

    def _bring(self, number: int) -> None:
        rest = self._rests.get(number)
        if rest is not None and rest.slot is not None:
            source = rest.slot.memory[: self.buckets[number].nbytes]
            self._slots.bring(number, source, rest.arrived, lambda: self.device_bytes // SLOTS)

    def _send(self, number: int, state: States, berth: Berth, image: list[Shown]) -> None:
        bucket, rest = self.buckets[number], self._rests[number]
        assert rest.slot is not None  # from where it came
        if bucket.is_shown(state, image):
            self._link.wait(Lane.TO_HOST, self._link.mark(self._link.stream()))
            self._link.copy(Lane.TO_HOST, rest.slot.memory, berth.memory[: bucket.nbytes])
            rest.arrived = self._link.mark(Lane.TO_HOST)
            show(rest.image)
        else:  # the optimizer has made some of its states anew, or has more of them
            self._place(number, state)
            if number not in self._rests:  # it stays on the device, but in no slot
                show(bucket.cloned())
        self._slots.give_back(berth)

    def _place(self, number: int, state: States, *, is_anywhere: bool = False) -> None:
        """Find the bucket's states a place where they rest, and send them there."""
        bucket = self.buckets[number]

        def moves(tensor: Tensor) -> bool:
            is_here = is_anywhere or tensor.device == self._device
            return is_here and size_bytes(tensor) >= self._least_bytes and is_dense(tensor)

        bucket.place(state, moves)
        if unknown := bucket.unknown(state):
            self._tell_once(f"tensors inside of {', '.join(unknown)} are not reached: they stay")
        if bucket.nbytes and self._stays(number):
            self._settle_in(number, None, self._link.allocate(bucket.nbytes))
            self._link.wait(self._link.stream(), self._rests[number].arrived)
            return
        with self._lock:
            slot = self._pool.take(bucket.nbytes) if bucket.nbytes else None
        if slot is not None:
            self._settle_in(number, slot, slot.memory)
            return
        self._rests.pop(number, None)
        if bucket.nbytes:
            self._tell_once("the host has no more to pin for an optimizer's states: some stay")
            bucket.nbytes = 0

    def _settle_in(self, number: int, slot: Slot | None, memory: Tensor) -> None:
        """Have a bucket's states rest in a range, and send them there.

        Where that fails they are where they were, and what they rested in is not given up: some of
        them may be views of it.
        """
        bucket = self.buckets[number]
        image = bucket.image(memory)
        rest = _Rest(slot, image, None)
        if slot is not None:
            weakref.finalize(rest, self._pool.retire, slot)
        lane = Lane.TO_DEVICE if slot is None else Lane.TO_HOST
        self._link.wait(lane, self._link.mark(self._link.stream()))
        for source, target in zip(
            bucket.moving(bucket.placed()), bucket.moving(image), strict=True
        ):
            self._link.copy(lane, target, source)
            if source.device.type != "cpu":
                self._link.used_by(source, lane)
        rest.arrived = self._link.mark(lane)
        self._rests[number] = rest
        bucket.stand_for(image)
        show(image)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(f"{text} on the device", VramxWarning, stacklevel=2)
