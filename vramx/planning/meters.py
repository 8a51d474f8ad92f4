"""Bytes and milliseconds of what runs: as a GPU's allocator and events tell, or counted on a host.

CudaMeter reads torch's allocator; nothing is slowed. HostMeter sees every operation's results and
counts storages until they die: what torch's operations use within themselves is not seen, and each
call costs tens of microseconds, so times are taken while it does not watch. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from math import ceil, floor
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
from torch import Tensor, nn

from vramx.compression.offload.offload import offload_report
from vramx.nn import operators
from vramx.planning.storages import Storages, Watch
from vramx.sizes import MIB

_SAMPLES = 7
_HOST_SAMPLES = 3
# How long a GPU is kept waiting for the host, in what the host took before, and in cycles of a
# clock of 2 GHz; of a faster one, two thirds of it are still longer than the host took.
_PATIENCE = 2.0
_CYCLES_PER_MS = 2_000_000


class Spread(NamedTuple):
    """How much higher a later peak of the same step may be: by a share of it, and by bytes."""

    share: Fraction = Fraction(0)
    fixed: int = 0

    def above(self, peak_bytes: int) -> int:
        """Return the smallest budget that a step of this measured peak stays within."""
        return ceil(peak_bytes * (1 + self.share)) + self.fixed

    def below(self, budget_bytes: int) -> int:
        """Return the highest measured peak of which above() is no more than a budget."""
        return floor((budget_bytes - self.fixed) / (1 + self.share))


class Busy(NamedTuple):
    """What a call keeps busy: the host until all is enqueued, and the device if never waiting.

    On a GPU the two run at the same time, and the longer one is what many calls in a row take.
    """

    host_ms: float
    device_ms: float


class Meter(Protocol):
    """What measures a device. Bytes are counted only within watching()."""

    spread: Spread

    def watching(self) -> contextlib.AbstractContextManager[Any]: ...
    def allocated_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...
    def settle(self) -> None:
        """Wait for the device, and let go of what has left it by then."""

    def time_ms(self, function: Callable[[], Any], samples: int = _SAMPLES) -> float:
        """Return the lower quartile of the times of so many calls; one has been made before.

        What else runs on a host adds to what it takes, and never takes from it. But most hosts are
        disturbed now and then, which the least of the times would not show.
        """

    def busy(self, function: Callable[[], Any], calls: int) -> Busy:
        """Return the least of some means of so many calls; one has been made before."""


class CudaMeter:
    """Of one GPU."""

    # torch's allocator hands out a cached block whole where no more than 1 MiB would be left of it,
    # and counts all of it, so that a peak depends on what is cached: of 45 plans on an H200 one was
    # higher the next time by 2.3 MiB of 4.8 GiB, others lower by up to 5.4 MiB and 0.0023.
    spread = Spread(Fraction(1, 400), 2 * MIB)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        yield

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        offload_report()  # it lets go of what has been copied by now

    def time_ms(self, function: Callable[[], Any], samples: int = _SAMPLES) -> float:
        return sorted(self._elapsed_ms(function, 1) for _ in range(samples))[samples // 4]

    def busy(self, function: Callable[[], Any], calls: int) -> Busy:
        samples = [self._sample(function, calls) for _ in range(_SAMPLES)]
        return Busy(*map(min, zip(*samples, strict=True)))

    def _sample(self, function: Callable[[], Any], calls: int) -> Busy:
        torch.cuda.synchronize(self._device)
        host_ms = _host_ms(function, calls)
        # A device that finds everything in its queue never waits for the host.
        wait = int(_PATIENCE * host_ms * calls * _CYCLES_PER_MS)
        return Busy(host_ms, self._elapsed_ms(function, calls, wait))

    def _elapsed_ms(self, function: Callable[[], Any], calls: int, wait_cycles: int = 0) -> float:
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        if wait_cycles:
            with torch.cuda.device(self._device):
                torch.cuda._sleep(wait_cycles)
        start.record(stream)
        for _ in range(calls):
            function()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / calls


class HostMeter:
    """Of the host: a model's parameters, buffers and gradients, and storages that appear.

    `others` are tensors that count as well: an optimizer's states.
    """

    spread = Spread()

    def __init__(self, model: nn.Module, others: Iterable[Tensor] = ()) -> None:
        tensors = [*model.parameters(), *model.buffers(), *others]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        self._counted = Storages()
        for tensor in tensors:
            self._counted.add(tensor, counts=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        # A mode sees an operator of vramx as one, and what it takes within is more than it returns.
        opened = mock.patch.object(operators, "_len_torch_dispatch_stack", int)
        # What torch.compile meets within a mode it passes over for good, and fullgraph raises.
        with torch.compiler.set_stance("force_eager"), Watch(self._counted), opened:
            yield

    def allocated_bytes(self) -> int:
        return self._counted.live_bytes

    def peak_bytes(self) -> int:
        return self._counted.peak_bytes

    def reset_peak(self) -> None:
        self._counted.peak_bytes = self._counted.live_bytes

    def settle(self) -> None:
        pass

    def time_ms(self, function: Callable[[], Any], samples: int = _HOST_SAMPLES) -> float:
        return self.busy(function, 1, samples).host_ms

    def busy(self, function: Callable[[], Any], calls: int, samples: int = _HOST_SAMPLES) -> Busy:
        times = (_host_ms(function, calls) for _ in range(samples))
        return Busy(min(times), 0.0)


def _host_ms(function: Callable[[], Any], calls: int) -> float:
    start_s = time.perf_counter()
    for _ in range(calls):
        function()
    return 1e3 * (time.perf_counter() - start_s) / calls


def meter_of(device: torch.device, model: nn.Module, others: Iterable[Tensor] = ()) -> Meter:
    """Return what measures a device; gradients that count must exist."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter(model, others)
