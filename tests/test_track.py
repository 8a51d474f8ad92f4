"""vramx.track on the simulated device: exact peaks, however regions nest and end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from simulated import MIB
from simulated_cuda import Cuda

import vramx
from vramx.errors import InvalidValueError, VramxError
from vramx.memory import track as module
from vramx.memory.track import Tracked, track


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(module, "_regions", [])
    return Cuda(monkeypatch)


def figures(tracked: Tracked) -> tuple[int, int, int]:
    """Return peak, live and delta in MiB."""
    sizes = (tracked.peak_bytes, tracked.live_bytes, tracked.delta_bytes)
    return sizes[0] // MIB, sizes[1] // MIB, sizes[2] // MIB


def test_a_region_has_its_own_peak(cuda: Cuda) -> None:
    cuda.spike(24 * MIB)  # before it, and higher
    cuda.take(2 * MIB)
    with vramx.track("forward") as memory:
        cuda.spike(8 * MIB)
        cuda.take(4 * MIB)
    assert figures(memory) == (10, 6, 4)
    assert (memory.device, memory.retries, memory.ooms) == (0, 0, 0)
    assert memory.reserved_bytes == cuda.devices[0].stats()["reserved_bytes"]["current"]
    assert memory.peak_reserved_bytes >= memory.peak_bytes


def test_an_inner_region_does_not_lose_the_outers_peak(cuda: Cuda) -> None:
    with track("outer") as outer:
        cuda.spike(20 * MIB)
        with track("first") as first:
            cuda.spike(6 * MIB)
        cuda.spike(10 * MIB)
        with track("second") as second, track("innermost") as innermost:
            cuda.spike(4 * MIB)
    assert [figures(each)[0] for each in (outer, first, second, innermost)] == [20, 6, 4, 4]
    with track("outer") as outer:
        with track("inner"):
            cuda.spike(16 * MIB)
        with track("later"):
            cuda.spike(2 * MIB)
    assert figures(outer)[0] == 16


def test_regions_of_threads_overlap(cuda: Cuda) -> None:
    first, second = track("first"), track("second")
    a = first.__enter__()
    cuda.spike(12 * MIB)
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    cuda.spike(6 * MIB)
    first.__exit__()
    cuda.spike(8 * MIB)
    b = second._open
    assert b is not None
    second.__exit__()
    assert (figures(a)[0], figures(b[0])[0]) == (12, 8)
    assert module._regions == []


def test_each_device_has_its_regions_of_those_that_were_entered_on_it(cuda: Cuda) -> None:
    with track("first") as first:
        cuda.spike(20 * MIB)
        cuda.current = 1
        with track("second") as second:
            cuda.spike(6 * MIB)
    assert (first.device, second.device) == (0, 1)
    assert (figures(first)[0], figures(second)[0]) == (20, 6)


def test_a_failure_fills_the_figures_as_well(cuda: Cuda) -> None:
    def fill() -> None:
        cuda.take(20 * MIB)
        cuda.take(20 * MIB)

    with pytest.raises(MemoryError), track("region") as memory:
        fill()
    assert figures(memory) == (20, 20, 20)
    assert memory.ooms == 1
    assert module._regions == []


def test_memory_that_is_freed_is_a_negative_delta(cuda: Cuda) -> None:
    kept = cuda.take(6 * MIB)
    with track("free") as memory:
        cuda.give(kept)
    assert figures(memory) == (6, 0, -6)
    assert str(memory).startswith("free: peak 6.00 MiB, live 0 B (-6.00 MiB), reserved ")


def test_a_function_is_tracked_call_by_call(cuda: Cuda) -> None:
    @track("step")
    def step(size: int, *, inner: int = 0) -> str:
        cuda.spike(size)
        if inner:
            step(inner)
        return "done"

    assert step.tracked is None
    assert step(4 * MIB) == "done"
    assert figures(step.tracked)[0] == 4
    step(8 * MIB, inner=2 * MIB)
    assert figures(step.tracked)[0] == 8
    assert step.__name__ == "step"


def test_the_gpu_is_waited_for_only_where_asked(cuda: Cuda) -> None:
    with track("region"):
        pass
    assert cuda.waits == []
    with track("region", device=1, synchronize=True):
        pass
    assert cuda.waits == [1, 1]


def test_cuda_is_not_initialised_by_tracking(cuda: Cuda) -> None:
    cuda.initialised = False
    with track("outer") as unused, track("inner"):
        pass
    assert unused.device is None
    assert str(unused) == "outer: no CUDA memory was used"
    with track("outer") as first:
        cuda.initialised, cuda.current = True, 1
        cuda.spike(12 * MIB)
        with track("inner"):
            cuda.spike(4 * MIB)
    assert (first.device, figures(first)[0]) == (1, 12)


def test_a_region_is_entered_once_at_a_time(cuda: Cuda) -> None:
    region = track("region")
    with region, pytest.raises(VramxError, match="'region' is open already"):
        region.__enter__()
    with region as memory:
        cuda.spike(2 * MIB)
    assert figures(memory)[0] == 2


def test_an_allocator_without_statistics_is_said(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: int) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    with pytest.raises(VramxError, match="keeps no statistics: CUDAPluggableAllocator"):
        track("region").__enter__()
    assert module._regions == []


def generator() -> Any:
    yield


async def coroutine() -> None: ...


@pytest.mark.parametrize("target", [generator, coroutine, 7, dict])
def test_what_would_not_be_tracked_is_refused(target: Any) -> None:
    with pytest.raises(InvalidValueError, match="cannot be tracked; a function is accepted"):
        track("region")(target)


@pytest.mark.parametrize("device", ["cpu", -1, 1.5, True, "cuda:x", torch.device("cpu")])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(InvalidValueError, match="1 or 'cuda:1' is, or None"):
        track("region", device=device)


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_device_is_named_in_each_form(cuda: Cuda, device: Any) -> None:
    with track("region", device=device) as memory:
        pass
    assert memory.device == 1
