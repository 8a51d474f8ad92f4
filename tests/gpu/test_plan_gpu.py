"""vramx.plan on a GPU: budgets are kept by what torch's allocator counts, and the state is kept."""

from __future__ import annotations

import gc
import time
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vramx
from vramx.planning.meters import CudaMeter

pytestmark = pytest.mark.gpu

# The goal that vramx.plan is measured by.
ERROR = 0.05
WIDTH = 1024


class Attention(nn.Module):
    """A block of a transformer, as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "12")
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def own_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), *(Attention() for _ in range(4)))


def known_model() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(WIDTH, 16, batch_first=True) for _ in range(4))
    return nn.Sequential(nn.Linear(64, WIDTH), *layers)


@cache
def idle_weight() -> Tensor:
    weight = torch.zeros(1, device="cuda", requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    return weight


def bytes_at_rest() -> int:
    # Autograd's thread may still hold the last node's packs when backward() returns. It has let go
    # of them when it runs another node, here one of a tensor that is there all the time.
    weight = idle_weight()
    weight.clone().backward(weight.grad)
    gc.collect()
    return torch.cuda.memory_allocated()


def peak_bytes(model: nn.Module, sample: Tensor) -> int:
    for _ in range(2):
        model.zero_grad()  # gradients come as activations go
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(sample).float().mean().backward()
    peak = torch.cuda.max_memory_allocated()
    model.zero_grad()
    return peak


@pytest.mark.alone  # steps are timed
@pytest.mark.parametrize("make", [own_model, known_model])
def test_peaks_stay_within_budgets_and_near_their_prediction(make: Any) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, sample = make().bfloat16(), torch.randn(8, 1024, 64, dtype=torch.bfloat16)
    widest = vramx.plan(model, sample)
    low, high = widest.with_budget(sample, "smallest").needed_bytes, widest.needed_bytes
    assert low < 0.75 * high  # of weights, gradients and all; or there is nothing to choose
    times = []
    for part in range(5):
        budget = low + (high - low) * part // 4
        plan = widest.with_budget(sample, budget)
        assert plan.measured_bytes <= budget
        assert plan.measured_bytes == pytest.approx(plan.predicted_bytes, rel=ERROR)
        plan.apply()
        peak = peak_bytes(model, sample)
        assert peak <= budget
        assert peak == pytest.approx(plan.measured_bytes, rel=ERROR)
        plan.undo()
        times.append(plan.measured_ms)
    assert times == sorted(times, reverse=True)


def test_garbage_of_before_is_no_part_of_a_peak() -> None:
    with torch.device("cuda"):
        model, sample = own_model().bfloat16(), torch.randn(2, 1024, 64, dtype=torch.bfloat16)
    clean = vramx.plan(model, sample).measured_bytes
    gc.disable()
    try:
        cycle: list[Any] = [torch.empty(clean, dtype=torch.uint8, device="cuda")]
        cycle.append(cycle)
        del cycle
        assert vramx.plan(model, sample).measured_bytes == pytest.approx(clean, rel=ERROR)
    finally:
        gc.enable()


@pytest.mark.alone
def test_a_device_is_busy_for_no_longer_because_the_host_is_slow() -> None:
    operand = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def multiply(pause_s: float) -> None:
        time.sleep(pause_s)
        torch.mm(operand, operand)

    meter = CudaMeter(operand.device)
    multiply(0.0)
    quick, slow = (meter.busy(partial(multiply, pause_s), 3) for pause_s in (0.0, 0.01))
    assert quick.host_ms < quick.device_ms < 10 <= slow.host_ms
    # Clocks may change it; the pause, if it counted, would make it ten milliseconds and more.
    assert slow.device_ms == pytest.approx(quick.device_ms, rel=0.5)
    assert meter.time_ms(partial(multiply, 0.01)) >= 10


def test_what_is_offloaded_makes_room() -> None:
    with torch.device("cuda"):
        model, sample = own_model().bfloat16(), torch.randn(32, 1024, 64, dtype=torch.bfloat16)
    packed = vramx.plan(model, sample, levels=("int8",))
    moved = vramx.plan(model, sample, levels=("int8_offload",))
    assert moved.measured_bytes < packed.measured_bytes
    assert set(moved.words.values()) == {"int8_offload"}


def test_a_model_that_does_not_fit_as_it_is_can_be_planned() -> None:
    with torch.device("cuda"):
        model, sample = own_model().bfloat16(), torch.randn(16, 1024, 64, dtype=torch.bfloat16)
    wide = vramx.plan(model, sample)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    cap = (wide.measured_bytes + wide.smallest_bytes) // 2
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        found = vramx.plan(model, sample)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.measured_bytes < wide.measured_bytes


def test_random_numbers_gradients_and_memory_are_as_before() -> None:
    with torch.device("cuda"):
        model, sample = own_model().bfloat16(), torch.randn(4, 256, 64, dtype=torch.bfloat16)
    # cuBLAS takes a workspace once for each thread, and the codec and the kernels what they keep.
    vramx.plan(model, sample, "smallest")
    before, state = bytes_at_rest(), torch.cuda.get_rng_state()
    plan = vramx.plan(model, sample, "smallest")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert bytes_at_rest() == before
    assert plan.words
