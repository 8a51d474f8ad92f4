"""Pinned host memory in slabs: where packed buffers lie while they are away from the device.

torch's own pinned cache rounds each block up to a power of two, and pinning costs a millisecond for
each few MiB; so whole slabs are asked of it and divided here. Knows nothing of streams: whoever
gives a slot back says by the order of his copies when it may be written again. Not thread-safe: the
stash holds its lock. Taking and giving back are linear in the free ranges, which are few because
the sizes of a training step repeat.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vramx.sizes import GIB, MIB

# Copies of aligned ranges run at the full speed of the link.
_ALIGNMENT_BYTES = 512
_SMALLEST_SLAB_BYTES = 64 * MIB
_LARGEST_SLAB_BYTES = GIB
# What is larger lies in parts: a slab of its own would be up to twice as large. A copy of one takes
# 5 ms, a thousand times what it costs the host to ask for it.
_PART_BYTES = 256 * MIB


@dataclass(frozen=True, eq=False)
class Slot:
    """A range of a slab: `memory` is its bytes, `size_bytes` what it takes of the slab."""

    slab: Slab
    start: int
    size_bytes: int
    memory: Tensor


class Slab:
    """One block of pinned memory and its free ranges, sorted by start, none touching the next."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.size_bytes = memory.numel()
        self.starts = [0]
        self.sizes = [self.size_bytes]

    def take(self, size_bytes: int) -> int | None:
        """Return the start of the smallest free range that fits, now shorter; None if none does."""
        fitting = [(size, i) for i, size in enumerate(self.sizes) if size >= size_bytes]
        if not fitting:
            return None
        size, i = min(fitting)
        start = self.starts[i]
        if size == size_bytes:
            del self.starts[i], self.sizes[i]
        else:
            self.starts[i] += size_bytes
            self.sizes[i] -= size_bytes
        return start

    def give_back(self, start: int, size_bytes: int) -> None:
        i = bisect_left(self.starts, start)
        if i < len(self.starts) and start + size_bytes == self.starts[i]:
            size_bytes += self.sizes[i]
            del self.starts[i], self.sizes[i]
        if i > 0 and self.starts[i - 1] + self.sizes[i - 1] == start:
            self.sizes[i - 1] += size_bytes
            return
        self.starts.insert(i, start)
        self.sizes.insert(i, size_bytes)


class HostPool:
    """Slabs of pinned memory, up to a limit; they are kept until close().

    Args:
        pin: returns that many bytes of pinned memory as a uint8 tensor, or raises RuntimeError.
        limit_bytes: never to hold more than this.
        pools: those that share the limit, this one among them: none holds more than an even part
            of it. None: this one alone.
    """

    def __init__(
        self,
        pin: Callable[[int], Tensor],
        limit_bytes: int,
        pools: Sequence[HostPool] | None = None,
    ) -> None:
        self._pin = pin
        self._limit_bytes = limit_bytes
        self._pools = pools
        self._slabs: list[Slab] = []
        self._retired: deque[Slot] = deque()
        self.used_bytes = 0

    @property
    def held_bytes(self) -> int:
        return sum(slab.size_bytes for slab in self._slabs)

    def take(self, nbytes: int) -> Slot | None:
        """Return a slot, or None where the limit or the host's memory is reached."""
        self.collect()
        size_bytes = max(1, -(-nbytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        for slab in self._slabs:
            start = slab.take(size_bytes)
            if start is not None:
                return self._slot(slab, start, size_bytes, nbytes)
        grown = self._grow(size_bytes)
        if grown is None:
            return None
        start = grown.take(size_bytes)
        assert start is not None
        return self._slot(grown, start, size_bytes, nbytes)

    def take_parts(self, nbytes: int) -> tuple[Slot, ...] | None:
        """Return slots that hold so many bytes one behind the other; None as take() does."""
        parts: list[Slot] = []
        for start in range(0, nbytes, _PART_BYTES):
            slot = self.take(min(_PART_BYTES, nbytes - start))
            if slot is None:
                for part in parts:
                    self.give_back(part)
                return None
            parts.append(slot)
        return tuple(parts)

    def give_back(self, slot: Slot) -> None:
        slot.slab.give_back(slot.start, slot.size_bytes)
        self.used_bytes -= slot.size_bytes

    def retire(self, slot: Slot) -> None:
        """Give a slot back from a finalizer, which may run at any moment on any thread."""
        self._retired.append(slot)

    def collect(self) -> None:
        """Take back what was retired."""
        while self._retired:
            self.give_back(self._retired.popleft())

    def close(self) -> None:
        """Let go of the slabs; slots that are out keep theirs alive."""
        self._slabs.clear()

    def check(self) -> None:
        """Name the first violated equation.

        Of each slab: free ranges are sorted with a gap between them, and lie within the slab. Of
        the pool: free bytes + used_bytes == held_bytes.
        """
        free_bytes = 0
        for slab in self._slabs:
            end = -1
            for start, size in zip(slab.starts, slab.sizes, strict=True):
                assert start > end, f"free range {start} after {end}"
                end = start + size
            assert end <= slab.size_bytes, f"free range ends at {end} of {slab.size_bytes}"
            free_bytes += sum(slab.sizes)
        assert free_bytes + self.used_bytes == self.held_bytes, (
            f"{free_bytes} free + {self.used_bytes} used != {self.held_bytes} held"
        )

    def _slot(self, slab: Slab, start: int, size_bytes: int, nbytes: int) -> Slot:
        self.used_bytes += size_bytes
        return Slot(slab, start, size_bytes, slab.memory[start : start + nbytes])

    def _room_bytes(self, held: int) -> int:
        pools = self._pools
        if pools is None:
            return self._limit_bytes - held
        held_by_all = sum(pool.held_bytes for pool in pools)
        return min(self._limit_bytes // len(pools) - held, self._limit_bytes - held_by_all)

    def _grow(self, size_bytes: int) -> Slab | None:
        """Add a slab of a power of two, so that torch's cache rounds nothing; larger each time."""
        held = self.held_bytes
        wanted = min(max(held, _SMALLEST_SLAB_BYTES), _LARGEST_SLAB_BYTES)
        for size in (max(wanted, size_bytes), size_bytes):
            rounded = 1 << (size - 1).bit_length()
            if rounded > self._room_bytes(held):
                continue
            try:
                # All share it: a tensor of inference mode could not be written outside of that.
                with torch.inference_mode(False):
                    slab = Slab(self._pin(rounded))
            except RuntimeError:  # the host has no more to pin
                continue
            self._slabs.append(slab)
            return slab
        return None
