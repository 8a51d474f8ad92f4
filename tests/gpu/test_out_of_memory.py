"""Out of memory: torch's own error, in the words that programs look for, and life after it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from gpu.tools import GIB, MIB, block, counters, failure_of, holds, room, settle

pytestmark = pytest.mark.gpu

MORE_THAN_ANY_GPU = 1 << 50


def test_the_error_is_torchs_and_begins_with_the_usual_words() -> None:
    error = failure_of(lambda: block(MORE_THAN_ANY_GPU))
    assert type(error) is torch.OutOfMemoryError is torch.cuda.OutOfMemoryError
    assert isinstance(error, RuntimeError)
    assert len(error.args) == 1
    assert str(error).startswith("CUDA out of memory. Tried to allocate ")


def test_a_failure_is_counted_once() -> None:
    before = counters()
    with room(900 * MIB):
        failure_of(lambda: block(GIB))
    after = counters()
    assert after["num_ooms"] - before["num_ooms"] == 1
    assert after["num_alloc_retries"] > before["num_alloc_retries"]
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]


def test_work_goes_on_after_a_failure() -> None:
    with room(900 * MIB):
        kept = block(256 * MIB, 7)
        failure_of(lambda: block(GIB))
        second = block(256 * MIB, 9)
        assert holds(kept[:MIB], 7)
        assert holds(second[:MIB], 9)


def test_cached_memory_is_used_before_a_request_fails() -> None:
    with room(900 * MIB):
        pieces = [block(64 * MIB) for _ in range(12)]
        pieces.clear()
        assert block(768 * MIB).numel() == 768 * MIB


def test_a_failure_inside_backward_reaches_the_caller() -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + block(GIB)[0]

    x = torch.ones(4, device="cuda", requires_grad=True)
    with room(256 * MIB):
        error = failure_of(Greedy.apply(x).sum().backward)
        assert str(error).startswith("CUDA out of memory.")
        (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


def test_a_failure_in_resize_leaves_the_tensor_as_it_was() -> None:
    tensor = block(MIB, 5)
    with room(256 * MIB):
        failure_of(lambda: tensor.untyped_storage().resize_(GIB))
    assert tensor.untyped_storage().nbytes() == MIB
    assert holds(tensor, 5)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerate.utils.memory", "should_reduce_batch_size"),
        ("pytorch_lightning.utilities.memory", "is_cuda_out_of_memory"),
        ("pytorch_lightning.utilities.memory", "is_oom_error"),
    ],
)
def test_libraries_recognise_the_error(module: str, name: str) -> None:
    pytest.importorskip(module.partition(".")[0])
    recognises = getattr(importlib.import_module(module), name)
    assert recognises(failure_of(lambda: block(MORE_THAN_ANY_GPU)))


def test_accelerate_finds_the_batch_size_that_fits() -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        block(batch_size * 128 * MIB)
        return batch_size

    with room(900 * MIB):
        found = train()
    assert found == tried[-1] <= 7
    assert tried[0] == 16


def test_the_fraction_caps_and_lifting_it_lifts_the_cap() -> None:
    with room(900 * MIB):
        fraction = torch.cuda.get_per_process_memory_fraction()
        assert 0 < fraction < 1
        held = [block(256 * MIB) for _ in range(3)]
        failure_of(lambda: block(256 * MIB))
        assert torch.cuda.memory_reserved() <= fraction * torch.cuda.mem_get_info()[1]
    held.append(block(256 * MIB))
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="Invalid fraction"):
        torch.cuda.set_per_process_memory_fraction(fraction)


def test_an_observer_may_take_a_snapshot() -> None:
    """The usual use of it: write down what is in memory at the moment of the failure."""
    snapshots: list[dict[str, Any]] = []
    torch._C._cuda_attach_out_of_memory_observer(
        lambda *facts: snapshots.append(torch.cuda.memory._snapshot()) if not snapshots else None
    )
    kept = block(64 * MIB)
    with room(256 * MIB):
        failure_of(lambda: block(GIB))
    active = {
        piece["address"]
        for segment in snapshots[0]["segments"]
        for piece in segment["blocks"]
        if piece["state"] == "active_allocated"
    }
    assert kept.data_ptr() in active


def test_many_failures_leave_nothing_behind() -> None:
    settle()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with room(256 * MIB):
        for _ in range(50):
            failure_of(lambda: block(GIB))
        settle()
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() <= reserved
