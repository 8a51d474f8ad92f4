"""A device, its host and the link between them whose streams run only when a test says so.

Stands in for CudaTransport of vramx.compression.offload.transport. Device memory is one tensor,
divided into blocks of one size, each of one stream.
As in torch's caching allocator, a block that is freed goes
to the next allocation of its stream at once; it is overwritten in the order of that stream. So a
copy that is not ordered against the life of its memory reads or leaves garbage, if the streams run
in an order that shows it, and tests try those.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vramx.compression.offload.transport import Lane

POISON = 0xDD
BLOCK_BYTES = 1 << 10
POISONED_BYTES = 1 << 20  # of host memory: all that a test may use of a slab of 64 MiB


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor's memory, which lives on when the tensor dies, and has no version counter."""
    return tensor.detach().view(torch.uint8).numpy()


class Event:
    """Done once its stream has come to it; then it has a time."""

    def __init__(self, owner: str, timed: bool = False) -> None:
        self.owner = owner
        self.timed = timed
        self.time: float | None = None


@dataclass
class Operation:
    run: Callable[[], None] | None = None
    wait: Event | None = None
    record: Event | None = None
    milliseconds: float = 0.0


class Stream:
    """Operations that are still to be run, in order, and the time that those before took."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: deque[Operation] = deque()
        self.time = 0.0

    def step(self) -> bool:
        """Run the next operation; tell whether that was possible."""
        if not self.waiting:
            return False
        operation = self.waiting[0]
        if operation.wait is not None:
            if operation.wait.time is None:
                return False
            self.time = max(self.time, operation.wait.time)
        self.waiting.popleft()
        self.time += operation.milliseconds
        if operation.run is not None:
            operation.run()
        if operation.record is not None:
            operation.record.time = self.time
        return True


class FakeLink:
    """The transport. `forgets` names a wait that it drops, as in "main after to the host"."""

    def __init__(self, blocks: int = 64, forgets: str = "") -> None:
        self.memory = torch.full((blocks * BLOCK_BYTES,), POISON, dtype=torch.uint8)
        self.main = Stream("main")
        self.other = Stream("other")
        self.current = self.main
        self.is_capturing = False
        self.host_is_full = False
        self.fails = False
        self.bytes_per_ms = float("inf")
        self._forgets = forgets
        self._lanes = {lane: Stream(lane.value) for lane in Lane}
        half = blocks // 2
        self._free = {
            self.main.name: deque(range(half)),
            self.other.name: deque(range(half, blocks)),
        }
        self._users: dict[int, list[Stream]] = {}

    # -- Transport --------------------------------------------------------------------------------

    def stream(self) -> Stream:
        return self.current

    def capturing(self) -> bool:
        return self.is_capturing

    def allocate(self, nbytes: int) -> Tensor:
        assert nbytes <= BLOCK_BYTES
        block = self._free[self.current.name].popleft()
        memory = self._block(block)[:nbytes]
        weakref.finalize(memory, self._release, block, self.current)
        return memory

    def pin(self, nbytes: int) -> Tensor:
        if self.host_is_full:
            raise RuntimeError("no more memory to pin")
        memory = torch.empty(nbytes, dtype=torch.uint8)
        memory[:POISONED_BYTES] = POISON
        return memory

    def mark(self, place: Any, *, timed: bool = False) -> Event:
        stream = self.stream_of(place)
        event = Event(stream.name, timed)
        stream.waiting.append(Operation(record=event))
        return event

    def wait(self, place: Any, event: Event) -> None:
        stream = self.stream_of(place)
        if self._forgets != f"{stream.name} after {event.owner}":
            stream.waiting.append(Operation(wait=event))

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        if self.fails:
            raise RuntimeError("the copy failed")
        for memory in (target, source):
            assert memory.storage_offset() + memory.numel() <= POISONED_BYTES
        to, of = bytes_of(target), bytes_of(source)
        milliseconds = target.numel() / self.bytes_per_ms
        self._lanes[lane].waiting.append(
            Operation(run=lambda: np.copyto(to, of), milliseconds=milliseconds)
        )

    def used_by(self, memory: Tensor, place: Any) -> None:
        if self._forgets != "used by":
            users = self._users.setdefault(memory.storage_offset() // BLOCK_BYTES, [])
            users.append(self.stream_of(place))

    def done(self, event: Event) -> bool:
        return event.time is not None

    def synchronize(self, event: Event) -> None:
        self.run()

    def milliseconds(self, start: Event, end: Event) -> float:
        assert start.timed
        assert end.timed
        assert start.time is not None
        assert end.time is not None
        return end.time - start.time

    # -- What tests do ----------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._free.values())

    def stream_of(self, place: Any) -> Stream:
        return self._lanes[place] if isinstance(place, Lane) else place

    def produce(self, value: int, nbytes: int = BLOCK_BYTES) -> Tensor:
        """Return a buffer that the current stream will fill with a value."""
        buffer = self.allocate(nbytes)
        memory = bytes_of(buffer)
        self.current.waiting.append(Operation(run=lambda: memory.fill(value)))
        return buffer

    def read(self, buffer: Tensor) -> Tensor:
        """Have the current stream read a buffer; the result is there once the streams have run."""
        result = torch.empty_like(buffer)
        to, of = bytes_of(result), bytes_of(buffer)
        self.current.waiting.append(Operation(run=lambda: np.copyto(to, of)))
        return result

    def compute(self, milliseconds: float) -> None:
        self.current.waiting.append(Operation(milliseconds=milliseconds))

    def run(self, order: Sequence[str] = (), seed: int | None = None) -> None:
        """Run all streams to their end; the first of `order` that can go on is the one that does.

        With a seed, the stream is drawn anew for each operation.
        """
        streams = [self.main, self.other, *self._lanes.values()]
        streams.sort(key=lambda s: order.index(s.name) if s.name in order else len(order))
        chance = random.Random(seed)
        while any(stream.step() for stream in streams):
            if seed is not None:
                chance.shuffle(streams)
        stuck = [stream.name for stream in streams if stream.waiting]
        assert not stuck, f"{stuck} wait for ever"

    def _block(self, block: int) -> Tensor:
        return self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

    def _release(self, block: int, stream: Stream) -> None:
        for user in self._users.pop(block, []):
            stream.waiting.append(Operation(wait=self.mark(user)))
        memory = bytes_of(self._block(block))
        stream.waiting.append(Operation(run=lambda: memory.fill(POISON)))
        self._free[stream.name].appendleft(block)
