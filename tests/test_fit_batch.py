"""vramx.fit_batch: the largest batch in few trials, nothing held between them, the state as it was.

Trials run on a stand-in for a GPU: it counts what is held, raises torch's error above a capacity,
and is told of real tensors by nobody else.
"""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import pytest
import torch
from fit_tools import CAPACITY, Device, Held, Step

from vramx.errors import InvalidValueError, VramxError
from vramx.planning.fit import BatchFit, fit_batch
from vramx.planning.search import Search


def fit(step: Any, device: Device, **options: Any) -> BatchFit:
    return fit_batch(step, memory=device, **{"state": (), "margin": 0.0, **options})


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.mark.parametrize("row", [1, 3, 37, 900, 4000])
@pytest.mark.parametrize("fixed", [0, 500, 5000])
@pytest.mark.parametrize("optimizer", [0, 3000])
def test_the_largest_batch_is_that_of_an_exhaustive_search(
    device: Device, row: int, fixed: int, optimizer: int
) -> None:
    step = Step(device, fixed, row, optimizer)
    found = fit(step, device)
    assert found.batch == step.largest(CAPACITY)
    failed = [attempt.batch for attempt in found.attempts if attempt.peak_bytes is None]
    # Two batches make a line; where memory begins to grow at some batch, the next is a guess.
    assert len(failed) <= (0 if found.batch > 1 and not optimizer else 2)
    assert len(found.attempts) <= math.ceil(math.log2(found.batch + 1)) + 3


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({"margin": 0.2}, CAPACITY * 8 // 10),
        ({"budget": 2000}, 2000),
        ({"start": 4000}, CAPACITY),  # the first size is too large
    ],
)
def test_a_margin_is_left_free_and_a_budget_is_kept(
    device: Device, options: dict[str, Any], budget: int
) -> None:
    step = Step(device)
    found = fit(step, device, **options)
    assert found.batch == step.largest(budget)
    assert found.peak_bytes <= found.budget_bytes == budget


class Keeping(Step):
    """A step that leaves states behind, which another state makes it drop."""

    kept: Held | None = None

    def __call__(self, batch: int) -> None:
        super().__call__(batch)
        self.kept = self.kept or self.device.take(self.fixed)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        self.kept = None


def test_the_second_step_counts_where_states_stay(device: Device) -> None:
    step = Keeping(device, fixed=2000, row=10)
    assert fit(step, device, state=step).batch == (CAPACITY - 2 * 2000) // 10


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_alive_between_trials(device: Device, collects: bool) -> None:
    def step(batch: int) -> None:
        activations = device.take(batch)
        if batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        del activations

    if not collects:
        gc.disable()
    try:
        found = fit(step, device, start=64)
    finally:
        gc.enable()
    assert found.batch == 4
    assert set(device.held_at_release) == {0}


def test_memory_that_grows_by_doubling_is_no_line_and_is_bisected(device: Device) -> None:
    found = fit(lambda batch: device.take(64 * 2 ** math.ceil(math.log2(batch))), device)
    assert found.batch == 128
    assert len({attempt.batch for attempt in found.attempts}) <= math.ceil(math.log2(128)) + 4


@pytest.mark.parametrize("row", [1, 0])  # which does not grow
def test_the_largest_that_is_asked_for_is_tried(device: Device, row: int) -> None:
    step = Step(device, row=row)
    assert fit(step, device, max=256).batch == 256
    assert 256 in step.sizes


def test_out_of_memory_once_and_for_another_reason_does_not_make_the_batch_smaller(
    device: Device,
) -> None:
    step = Step(device)
    calls = []

    def disturbed(batch: int) -> None:
        calls.append(batch)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        step(batch)

    assert fit(disturbed, device).batch == step.largest(CAPACITY)


def test_memory_that_goes_away_is_an_error_and_no_batch_of_zero(device: Device) -> None:
    def leaking(batch: int) -> None:
        device.take(37 * batch)
        if batch > 1:
            device.capacity = 36

    with pytest.raises(VramxError, match="ran out of memory after it had fitted"):
        fit(leaking, device)


def test_out_of_memory_at_every_size_is_one_error(device: Device) -> None:
    step = Step(device, fixed=2 * CAPACITY)
    with pytest.raises(InvalidValueError, match="a step with a batch of 1 does not fit"):
        fit(step, device, start=16)


@pytest.mark.parametrize(("row", "largest"), [(1, CAPACITY), (200, 50)])
def test_evaluation_has_a_batch_of_its_own(device: Device, row: int, largest: int) -> None:
    step = Step(device)

    def evaluate(batch: int) -> None:
        assert not torch.is_grad_enabled()
        device.take(row * batch)

    found = fit(step, device, evaluate=evaluate)
    assert (found.batch, found.evaluation_batch) == (step.largest(CAPACITY), largest)


def test_evaluation_has_what_steps_leave_behind_beside_it(device: Device) -> None:
    step = Keeping(device, fixed=2000)
    found = fit(step, device, evaluate=lambda batch: device.take(100 * batch), state=step)
    assert found.evaluation_batch == (CAPACITY - step.fixed) // 100
    # No step is taken outside of a trial, where out of memory would be an error.
    assert len(step.sizes) == 2 * len(found.attempts)


@pytest.mark.parametrize(("rows", "cut"), [(1024, (256, 4)), (1000, (250, 4)), (8, (8, 1))])
def test_a_global_batch_is_cut_evenly(device: Device, rows: int, cut: tuple[int, int]) -> None:
    found = fit(Step(device, fixed=0), device, max=256, global_batch=rows)
    assert (found.micro_batch, found.accumulation) == cut


def test_a_step_without_a_model_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="refers to no model and no optimizer"):
        fit_batch(lambda batch: None, memory=Device())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start": 0}, "start 0 is not accepted"),
        ({"start": 9, "max": 8}, "start 9 is above max 8"),
        ({"max": 2.0}, "max 2.0 is not accepted"),
        ({"margin": 1.0}, "margin 1.0 is not accepted"),
        ({"global_batch": -1}, "global_batch -1 is not accepted"),
        ({"evaluate": 3}, "step 3 is not accepted"),
        ({"budget": "much"}, "size 'much' is not understood"),
        ({"step": 3}, "step 3 is not accepted"),
        ({"step": lambda batch: (each for each in range(batch))}, "of which nothing has run"),
    ],
)
def test_bad_input_is_one_clear_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        fit(**{"step": lambda batch: None, "device": Device(), **options})


def test_a_search_is_bounded_whatever_is_said_to_it() -> None:
    generator = random.Random(0)
    for _ in range(200):
        search = Search(1000, start=generator.randint(1, 64), most=1 << 20)
        fits = generator.randint(1, 1 << 20)
        while (batch := search.next()) is not None:
            assert 1 <= batch <= 1 << 20
            search.note(batch, generator.randint(1, 1000) if batch <= fits else None)
            assert search.tried <= 64
        assert search.best is None or search.best <= fits
