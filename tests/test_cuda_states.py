"""Nothing that vramx asks of torch's CUDA changes the device or spoils a fork; all of it may raise.

Of the parts beside the allocator, whose own tests are test_watching.py and test_install.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, cuda, shim
from optimizer_tools import LateLink, Pair, link

import vramx
from vramx.allocator import cuda_init
from vramx.memory.history import CudaHistory
from vramx.planning.device_memory import CudaMemory
from vramx.planning.isolated import free_garbage
from vramx.planning.program import Found
from vramx.planning.states_kept import generators_as_before

__all__ = ["cuda", "link", "shim"]


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where CUDA is not initialised: what is asked that would have the driver initialised.

    No child that is forked after it can use CUDA, and in the children of a process that uses CUDA
    it raises.
    """
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name) or True)
    return asked


def test_what_a_plan_puts_back_asks_nothing_that_spoils_a_fork(unasked: list[str]) -> None:
    with generators_as_before(Found()):
        free_garbage()
    assert unasked == []


def test_a_step_asks_of_captures_only_once_cuda_is_initialised(
    link: LateLink, unasked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("cuda", "accelerator"):  # torch's own question, by its release
        question = f"_{kind}_graph_capture_health_check"
        monkeypatch.setattr(torch.optim.Optimizer, question, lambda _: None, raising=False)
    pair = Pair()
    pair.step(0)
    assert unasked == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(vramx.VramxError, match="cannot be captured"):
        pair.step(1)


def test_the_bound_of_another_device_is_asked_for_and_the_current_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [0]

    def change(device: int) -> int:
        before, current[0] = current[0], device
        return before

    def fraction(device: torch.device) -> float:
        change(device.index)  # as torch up to 2.9
        return 0.25

    answers: dict[str, Any] = {
        "_exchange_device": change,
        "_maybe_exchange_device": change,
        "mem_get_info": lambda device: (700, 1000),
        "memory_reserved": lambda device: 100,
        "get_per_process_memory_fraction": fraction,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert CudaMemory(torch.device("cuda", 1)).limit_bytes() == 250
    assert current == [0]


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_without_a_history_is_told_of(cuda: FakeCuda, backend: str) -> None:
    cuda.patch.setattr(torch.cuda, "is_available", lambda: True)
    cuda.backend = backend
    with pytest.raises(vramx.VramxError, match=f"keeps no history: {backend} does not yet"):
        CudaHistory().start(77, "python")


def test_the_stand_in_ends_where_the_real_one_waits_or_crashes(cuda: FakeCuda) -> None:
    cuda_init.run_before(torch._C._cuda_isHistoryEnabled)
    cuda_init.run_after(torch.cuda.current_device)
    cuda.initialise()
    assert [end.split(",")[0] for end in cuda.ends] == [
        "torch's own allocator reads the first of no devices",
        "torch would wait for the lock of its initialisation",
    ]
    cuda.ends.clear()
