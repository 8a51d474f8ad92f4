"""What leaves a GPU without data: buffers, on their way there and back, and optimizers' states.

Copies are done at once here. On a GPU one is under way while the next is made, so the last two
buffers stay until the first comes back; what is brought back ahead of its time is not counted. Not
thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vramx.compression.offload.pinned import HostPool

_UNDER_WAY = 2
_ROOM_BYTES = 1 << 62


class FakeTicket:
    """A buffer that is on the host, or that stays, as compression/offload/stash.py has tickets."""

    def __init__(self, buffer: Tensor, moves: bool, under_way: deque[Tensor]) -> None:
        self.nbytes = buffer.nbytes
        self._device = buffer.device
        self._under_way = under_way
        self._held = buffer.to("cpu") if moves else buffer

    def get(self) -> Tensor:
        self._under_way.clear()
        return self._held.to(self._device)


class FakeLinks:
    """Stands for link_of() there: copies are done at once, and the host has room for all."""

    def __init__(self) -> None:
        self._links: dict[str, SimpleNamespace] = {}

    def __call__(self, device: torch.device) -> SimpleNamespace | None:
        if device.type != "cuda":
            return None
        if str(device) not in self._links:
            transport = _Transport(device)
            self._links[str(device)] = SimpleNamespace(
                transport=transport, pool=HostPool(transport.pin, _ROOM_BYTES), lock=Lock()
            )
        return self._links[str(device)]


class _Transport:
    """What transport.py's Transport says, without streams: an event is nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pin(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, _lane: Any, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("stream", "mark", "wait", "used_by", "synchronize"):
            raise AttributeError(name)
        return lambda *_, **__: None


class FakeStashes:
    """Stands for stash_of() of compression/offload/offload.py while a step is predicted."""

    def __init__(self) -> None:
        self._stashes: dict[tuple[str, str | float], FakeStash] = {}

    def __call__(self, device: torch.device, share: str | float) -> FakeStash | None:
        if device.type != "cuda":
            return None
        return self._stashes.setdefault((str(device), share), FakeStash(share))


class FakeStash:
    """Lets as large a share of all bytes go as it is to."""

    def __init__(self, share: str | float) -> None:
        self._share = 1.0 if isinstance(share, str) else share
        self._moved_bytes = self._bytes = 0
        self._under_way: deque[Tensor] = deque(maxlen=_UNDER_WAY)

    def put(self, buffer: Tensor) -> FakeTicket:
        self._bytes += buffer.nbytes
        moves = self._moved_bytes + buffer.nbytes <= self._share * self._bytes
        if moves:
            self._moved_bytes += buffer.nbytes
            self._under_way.append(buffer)
        return FakeTicket(buffer, moves, self._under_way)
