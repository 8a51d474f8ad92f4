"""What disturbs the allocator while a model trains on it: rubble, and memory given back and moved.

*Rubble* are blocks between which the free memory lies in pieces, each too small for a large tensor,
so that large tensors are put together from several. Memory is given back from the training thread,
between steps, and from a thread of its own, at any time. Both are drawn from seeds, but when the
thread gets to run is the scheduler's business.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vramx._core import Devices

KIB, MIB = 1 << 10, 1 << 20

RUBBLE_BYTES = 32 * MIB  # half of it stays
RUBBLE_BLOCK_BYTES = (150 * KIB, 700 * KIB)
PILE_UP_PERIOD = 4  # steps
# In these steps nothing but the program itself is at work: what is stitched in them, and found
# again, does not depend on when threads run.
QUIET_STEPS = 10
PAUSES_S = (0.0, 0.002, 0.03)  # of the thread; in the longest, a step can run whole


class Rubble:
    """Blocks that keep free pieces of their own sizes apart."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kept: list[torch.Tensor] = []

    def pile_up(self) -> None:
        """Fill memory with new blocks, and free every second of them."""
        self._kept.clear()
        blocks = [self._block()]
        while sum(block.numel() for block in blocks) < RUBBLE_BYTES:
            blocks.append(self._block())
        self._kept = blocks[::2]

    def stir(self) -> None:
        """Replace a block by another one."""
        self._kept[self._random.randrange(len(self._kept))] = self._block()

    def _block(self) -> torch.Tensor:
        return torch.empty(self._random.randint(*RUBBLE_BLOCK_BYTES), dtype=torch.uint8)


class Churn:
    """Calls trim and defragment, in the thread that trains and in one of its own.

    Used as a context manager, inside of which the thread may run. `broken` is the first equation
    of the allocator that did not hold.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._rubble = Rubble(seed=2)
        self._random = random.Random(3)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._disturb)
        self.calls = 0  # of the thread
        self.broken = ""

    def between_steps(self, step: int) -> None:
        if step % PILE_UP_PERIOD == 0:
            self._rubble.pile_up()
        if step < QUIET_STEPS:
            return
        if step == QUIET_STEPS:
            self._thread.start()
        self._rubble.stir()
        draw = self._random.random()
        if draw < 0.15:
            self._devices.defragment(0)
        elif draw < 0.3:
            self._devices.trim(0)

    def __enter__(self) -> Churn:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _disturb(self) -> None:
        choices = random.Random(4)
        while not self._stop.wait(choices.choice(PAUSES_S)):
            if choices.random() < 0.5:
                self._devices.defragment(0)
            else:
                self._devices.trim(0)
            self.broken = self.broken or self._devices.check(0)
            self.calls += 1
