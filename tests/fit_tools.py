"""A stand-in for a GPU on which vramx.fit_batch tries steps: it counts what is held."""

from __future__ import annotations

import weakref

import torch

CAPACITY = 10_000


class Held:
    """Memory that lives as long as this object."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes

    def __del__(self) -> None:
        self.device.live -= self.nbytes


class Device:
    """A GPU of CAPACITY bytes; `held` has a reference to all that was allocated."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity, self.live, self.peak, self.releases = capacity, 0, 0, 0
        self.held: list[weakref.ref[Held]] = []
        self.held_at_release: list[int] = []

    def take(self, nbytes: int) -> Held:
        if self.live + nbytes > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        made = Held(self, nbytes)
        self.held.append(weakref.ref(made))
        return made

    def limit_bytes(self) -> int:
        return self.capacity

    def allocated_bytes(self) -> int:
        return self.live

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.live

    def settle(self) -> None:
        pass

    def release(self) -> None:
        self.held_at_release.append(sum(ref() is not None for ref in self.held))


class Step:
    """A step that takes memory as training does: activations, then gradients, then states."""

    def __init__(self, device: Device, fixed: int = 500, row: int = 37, optimizer: int = 0) -> None:
        self.device, self.fixed, self.row, self.optimizer = device, fixed, row, optimizer
        self.sizes: list[int] = []

    def __call__(self, batch: int) -> None:
        self.sizes.append(batch)
        activations = self.device.take(self.row * batch)
        gradients = self.device.take(self.fixed)
        del activations
        states = self.device.take(self.optimizer)
        del gradients, states

    def largest(self, budget: int) -> int:
        """Return the largest batch that fits, by trying them all."""
        fits = [
            n
            for n in range(1, budget + 1)
            if max(self.row * n + self.fixed, self.fixed + self.optimizer) <= budget
        ]
        return max(fits, default=0)
