"""One buffer of a stash: where it is, and what is under way with it.

    RESIDENT  on the device for good: it was not to leave, or there was no room for it
    LEAVING   its copy to the host is under way; the device still has it
    AWAY      on the host only
    COMING    its copy back is under way; the next get takes that, and it is AWAY again

A record; what happens to it is stash.py's. Written under the stash's lock only.
"""

from __future__ import annotations

import enum
from typing import Any

from torch import Tensor

from vramx.compression.offload.pinned import Slot


class State(enum.Enum):
    """Where a buffer is."""

    RESIDENT = 0
    LEAVING = 1
    AWAY = 2
    COMING = 3


class Parcel:
    """One buffer, where it is, and the order in which it came."""

    __slots__ = (
        "buffer", "dead", "event", "gets", "nbytes", "sequence", "slots", "spoiled", "state",
        "step", "stream", "version",
    )  # fmt: skip

    def __init__(self, buffer: Tensor) -> None:
        self.buffer: Tensor | None = buffer
        self.version = buffer._version
        self.nbytes = buffer.numel()
        self.state = State.RESIDENT
        self.slots: tuple[Slot, ...] = ()  # where it lies on the host, one behind the other
        self.stream: Any = None  # whose memory the buffer is
        self.event: Any = None  # the end of its last copy
        self.step = -1  # the step that it counts in; what was put under capture is in none
        self.sequence = self.gets = 0
        self.spoiled = False  # changed in place while it was being copied out
        self.dead = False
