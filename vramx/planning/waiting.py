"""States that wait on the host between steps: what of them a budget better keeps on the device.

What a step lasts longer for their copies is what the link needs for them, less what backward hides.
Memory is worth more to a block that could keep its activations, or to states that need not travel:
that depends on the link, so it is measured, both directions at once as in a step. Not responsible
for moving anything (optimizers/stream.py). Measuring takes tens of milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vramx.compression.offload import offload
from vramx.compression.offload.transport import Lane
from vramx.planning.choice import fastest
from vramx.planning.timeline import Timeline
from vramx.sizes import MIB

# Of a step taken in backward: a pass backward takes twice the time of one forward, or more.
HIDDEN_BY_BACKWARD = 2 / 3
# Beyond what a processor's caches hold, for states come from its memory; in parts of a bucket.
_MOST_SAMPLE_BYTES, _PART_BYTES = 512 * MIB, 64 * MIB
_SAMPLES = 4
_SHARES = 8  # of the states: how finely it is tried how many stay


@dataclass(frozen=True)
class Waiting:
    """States that wait on the host.

    Attributes:
        ms_per_byte: how long the link takes, to the device and back at the same time.
        hidden: the share of a step that hides copies.
    """

    nbytes: int = 0
    ms_per_byte: float = 0.0
    hidden: float = 0.0

    def added_ms(self, kept_bytes: float, step_ms: float) -> float:
        """Return what a step takes longer where so many bytes stay."""
        return max(0.0, (self.nbytes - kept_bytes) * self.ms_per_byte - self.hidden * step_ms)

    def limit_beside(self, timeline: Timeline, limit_bytes: float) -> float:
        """Return the limit that a step should have, for it and the copies to take least together.

        What it leaves of `limit_bytes` is for states that stay. `limit_bytes` itself where there
        are none, or no limit.
        """
        best = math.inf, limit_bytes
        for part in range(_SHARES + 1) if self.nbytes and limit_bytes < math.inf else ():
            kept_bytes = self.nbytes * part // _SHARES
            found = fastest(timeline, limit_bytes - kept_bytes)
            if found is None:
                break
            added_ms = self.added_ms(kept_bytes, found.step_ms)
            best = min(best, (found.step_ms + added_ms, limit_bytes - kept_bytes))
            if not added_ms:  # more would gain nothing, and a choice takes its time
                break
        return best[1]


NONE = Waiting()


def ms_per_byte(device: torch.device, nbytes: int) -> float:
    """Measure a device's link with so many bytes; 0 where it has none, or none can be pinned.

    Sync: waits for the device.
    """
    link = offload.link_of(device)
    if link is None:
        return 0.0
    with link.lock:
        slots = [link.pool.take(min(nbytes, _MOST_SAMPLE_BYTES)) for _ in Lane]
    try:
        pinned = [slot.memory for slot in slots if slot is not None]
        return _measured(link, pinned) if len(pinned) == len(slots) else 0.0
    finally:
        for slot in slots:
            if slot is not None:
                link.pool.retire(slot)


def _measured(link: offload.Link, pinned: list[torch.Tensor]) -> float:
    """Return the milliseconds of a byte each way, of the best of some copies but the first."""
    transport = link.transport
    nbytes = pinned[0].numel()
    parts = [slice(start, start + _PART_BYTES) for start in range(0, nbytes, _PART_BYTES)]
    there = [transport.allocate(min(nbytes, _PART_BYTES)) for _ in Lane]
    samples = []
    for _ in range(1 + _SAMPLES):
        now = transport.mark(transport.stream(), timed=True)
        for lane in Lane:
            transport.wait(lane, now)
        for part in parts:
            for lane, host, memory in zip(Lane, pinned, there, strict=True):
                pair = host[part], memory[: host[part].numel()]
                transport.copy(lane, *(pair if lane is Lane.TO_HOST else pair[::-1]))
        ends = [transport.mark(lane, timed=True) for lane in Lane]
        for end in ends:
            transport.wait(transport.stream(), end)
            transport.synchronize(end)
        samples.append(max(transport.milliseconds(now, end) for end in ends))
    return min(samples[1:]) / nbytes
