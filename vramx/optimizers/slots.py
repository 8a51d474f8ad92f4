"""Three slots of a device, each as large as the largest bucket's states, and what is in them.

A bucket's states come to a slot while others are stepped, and leave it when they were. All of it is
ordered on the device; nothing here waits. What comes in vain makes room. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vramx.compression.offload.transport import Lane, Transport
from vramx.optimizers.states import Shown

SLOTS = 3


@dataclass(eq=False)
class Berth:
    """A slot of the device.

    Attributes:
        left: the event after which nothing reads or writes what was in it.
        images: what an optimizer sees of each bucket that was there, by its number, and the layout
            that it has so.
    """

    memory: Tensor
    left: Any
    images: dict[int, tuple[object, list[Shown]]] = field(default_factory=dict)


class Slots:
    """The slots of one device; none before the first bucket comes, and none after close()."""

    def __init__(self, link: Transport) -> None:
        self._link = link
        self._free: deque[Berth] = deque()
        self._coming: dict[int, tuple[Berth, Any]] = {}  # by bucket, and the event of its arrival

    def bring(
        self, number: int, source: Tensor, settled: Any, size_bytes: Callable[[], int]
    ) -> None:
        """Have a bucket come from the host, where it is after an event, if it does not yet.

        `size_bytes` returns that of slots, where there are none of the bucket's size.
        """
        if number in self._coming:
            return
        nbytes = source.numel()
        if not any(berth.memory.numel() >= nbytes for berth in self._all()):
            self._open(size_bytes())
        if not self._free:
            self.let_go(next(iter(self._coming)))
        berth = self._free.popleft()
        self._link.wait(Lane.TO_DEVICE, settled)
        self._link.wait(Lane.TO_DEVICE, berth.left)
        self._link.copy(Lane.TO_DEVICE, berth.memory[:nbytes], source)
        self._coming[number] = berth, self._link.mark(Lane.TO_DEVICE)

    def take(self, number: int) -> Berth | None:
        """Return where a bucket is, for whoever steps it; None: it has not been asked to come."""
        berth, arrived = self._coming.pop(number, (None, None))
        if berth is not None:
            self._link.wait(self._link.stream(), arrived)
        return berth

    def give_back(self, berth: Berth) -> None:
        """Have a slot free for another, when all that was asked of the lane to the host is done."""
        berth.left = self._link.mark(Lane.TO_HOST)
        self._free.append(berth)

    def let_go(self, number: int) -> None:
        """Have the slot of a bucket that comes in vain for another one."""
        if number in self._coming:
            self._free.append(self._coming.pop(number)[0])

    def turn_away(self) -> None:
        """Let go of the slots of all buckets that come in vain."""
        for number in list(self._coming):
            self.let_go(number)

    def close(self) -> None:
        """Let go of the slots. What was on its way in vain is still on the host."""
        for berth in self._all():
            for lane in Lane:
                self._link.used_by(berth.memory, lane)
        self._free.clear()
        self._coming.clear()

    def _open(self, size_bytes: int) -> None:
        self.close()
        memories = [self._link.allocate(size_bytes) for _ in range(SLOTS)]
        now = self._link.mark(self._link.stream())  # who had the memory before is done by then
        self._free.extend(Berth(memory, now) for memory in memories)

    def _all(self) -> list[Berth]:
        return [*self._free, *(berth for berth, _ in self._coming.values())]
