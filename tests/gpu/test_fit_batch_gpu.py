"""vramx.fit_batch on a GPU: as an exhaustive search, in few trials, and training goes on."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator

import pytest
import torch
from budget_models import PROGRAMS, Program

import vramx

pytestmark = pytest.mark.gpu

LIMIT_BYTES = 6 << 30
KINDS = ("transformer", "convolutions", "recurrent", "varying", "adapters")
# Of a batch: what kernels are chosen, and with them their workspaces, is not the same every time.
NEAR = 0.05


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """Have a process that may use LIMIT_BYTES."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def fits(program: Program, batch: int, budget_bytes: int) -> bool:
    """Tell whether two steps stay within a budget, with nothing left of them."""
    states = {key: value.clone() for key, value in program.model.state_dict().items()}
    torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(2):
            program.step(batch)
        torch.cuda.synchronize()
        fitted = torch.cuda.max_memory_allocated() <= budget_bytes
    except torch.OutOfMemoryError:
        fitted = False
    program.optimizer.zero_grad()
    program.optimizer.state.clear()
    program.model.load_state_dict(states)
    gc.collect()
    torch.cuda.empty_cache()
    return fitted


def largest(program: Program, budget_bytes: int) -> int:
    """Return the largest batch that fits, by bisection from a power of two that does not."""
    high = 1
    while fits(program, high, budget_bytes):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(program, middle, budget_bytes) else (low, middle)
    return low


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_is_that_of_an_exhaustive_search(kind: str) -> None:
    program = PROGRAMS[kind]()
    found = vramx.fit_batch(program.step)
    expected = largest(program, found.budget_bytes)
    assert abs(found.batch - expected) <= max(1, NEAR * expected)
    assert found.peak_bytes <= found.budget_bytes
    failed = [attempt for attempt in found.attempts if attempt.peak_bytes is None]
    assert len(failed) <= 1
    assert len(found.attempts) <= math.ceil(math.log2(found.batch + 1)) + 3


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_random_lengths(kind: str) -> None:
    program = PROGRAMS[kind]()
    found = vramx.fit_batch(program.step, margin=0.15)
    generator = random.Random(0)
    for _ in range(200):
        program.step(found.batch, generator.randint(program.longest // 2, program.longest))
    torch.cuda.synchronize()


def test_nothing_of_a_trial_is_left_and_the_state_is_what_it_was() -> None:
    program = PROGRAMS["transformer"]()
    program.step(2)
    torch.cuda.synchronize()
    gc.collect()
    weights = [p.detach().clone() for p in program.model.parameters()]
    states = [s["exp_avg"].clone() for s in program.optimizer.state.values()]
    generator = torch.cuda.get_rng_state()
    before = torch.cuda.memory_allocated()
    vramx.fit_batch(program.step, max=64)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert all(map(torch.equal, program.model.parameters(), weights))
    kept = [s["exp_avg"] for s in program.optimizer.state.values()]
    assert all(map(torch.equal, kept, states))
    assert torch.equal(torch.cuda.get_rng_state(), generator)


def test_a_prediction_and_a_fit_agree() -> None:
    program = PROGRAMS["autocast"]()
    found = vramx.fit_batch(program.step, max=128)
    predicted = vramx.predict(program.step, found.batch, policies="live")
    beside = sum(n for name, n in predicted.beside.items() if "cuBLAS" in name)
    assert abs(predicted.peak_bytes() - found.peak_bytes) <= 0.03 * found.peak_bytes + beside
