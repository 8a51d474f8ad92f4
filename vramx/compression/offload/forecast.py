"""How much of an offload's copying compute will hide: a measured step again, on a clock.

The stash itself runs, on streams that are numbers and memory that is none, so that whatever it does
about windows, order and prefetching is in the figure. Compute takes the time that it was measured
to take, copies what the link was measured to carry. Asks nothing of a device; takes about eight
milliseconds of the host for a step of a hundred buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vramx.compression.offload.budget import Measured, Share
from vramx.compression.offload.pinned import HostPool
from vramx.compression.offload.stash import Stash, Ticket
from vramx.compression.offload.transport import Lane

# What leaves of the first step is no guide, of the second it follows from the first; a step's times
# are read when the next one begins.
_STEPS = 4
_ANY_BYTES = 1 << 62


class Clock:
    """A transport for one stream. A place is its time in ms, an event a time that has been."""

    def __init__(self, bytes_per_ms: dict[Lane, float]) -> None:
        self._bytes_per_ms = bytes_per_ms
        self._times: dict[Lane | None, float] = dict.fromkeys((None, *Lane), 0.0)
        self._seen_ms = 0.0  # up to where the host, which runs ahead, knows all to be done

    def stream(self) -> None:
        return None

    def capturing(self) -> bool:
        return False

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def pin(self, nbytes: int) -> Tensor:
        return self.allocate(nbytes)

    def mark(self, place: Lane | None, *, timed: bool = False) -> float:  # noqa: ARG002
        return self._times[place]

    def wait(self, place: Lane | None, event: float) -> None:
        self._times[place] = max(self._times[place], event)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:  # noqa: ARG002
        self._times[lane] += target.numel() / self._bytes_per_ms[lane]

    def used_by(self, memory: Tensor, place: None) -> None: ...

    def done(self, event: float) -> bool:
        return event <= self._seen_ms

    def synchronize(self, event: float) -> None:
        self._times[None] = self._seen_ms = max(self._seen_ms, event)

    def milliseconds(self, start: float, end: float) -> float:
        return end - start

    def compute(self, milliseconds: float) -> None:
        self._times[None] += milliseconds

    def finish(self) -> None:
        """Let both lanes run dry, as they do between two steps, and the host see that."""
        self._times[None] = self._seen_ms = max(self._times.values())


def hidden_part(measured: Measured, share: Share, window_bytes: int) -> float | None:
    """Return the part of the time of the next steps' copies that compute hides; None: not known."""
    if not measured.moments or len(measured.bytes_per_ms) < len(Lane):
        return None
    clock = Clock(measured.bytes_per_ms)
    stash = Stash(share, clock, HostPool(clock.pin, _ANY_BYTES), window_bytes=window_bytes)
    # Where the caller only infers, tensors have no versions for the stash to look at.
    with torch.inference_mode(False):
        for _ in range(_STEPS):
            _take_step(clock, stash, measured)
    return stash.budget.measured.hidden_part()


def _take_step(clock: Clock, stash: Stash, measured: Measured) -> None:
    last_gets = {moment.sequence: i for i, moment in enumerate(measured.moments)}
    tickets: dict[int, Ticket] = {}
    computed_ms = 0.0
    for i, moment in enumerate(measured.moments):
        clock.compute(moment.computed_ms - computed_ms)
        computed_ms = moment.computed_ms
        if moment.nbytes is not None:
            tickets[moment.sequence] = stash.put(clock.allocate(moment.nbytes))
            continue
        tickets[moment.sequence].get()
        if last_gets[moment.sequence] == i:
            del tickets[moment.sequence]
    clock.finish()
