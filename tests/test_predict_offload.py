"""Predicted steps of models whose packed tensors, or optimizers' states, wait on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_tools import LateLink, use
from predict_tools import peak
from torch import Tensor, nn

import vramx

LAYERS, ROWS, WIDTH = 8, 4096, 256


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def peak_with(change: Any) -> int:
    model, x = nn.Sequential(*(Layer() for _ in range(LAYERS))), torch.randn(ROWS, WIDTH)
    change(model)
    return peak(lambda: model(x).sum().backward())


def checkpointed(offload: Any) -> Any:
    return lambda model: vramx.checkpoint_modules(
        model, lambda each: type(each) is Layer, offload=offload
    )


def compressed(offload: Any) -> Any:
    return lambda model: vramx.compressed_activations(model, level="int8", offload=offload)


@pytest.mark.parametrize("how", [checkpointed, compressed])
def test_what_waits_on_the_host_is_not_on_the_gpu(how: Any) -> None:
    stays, half, leaves = (peak_with(how(share)) for share in (None, 0.5, "cpu"))
    saved = 2 * (LAYERS - 3) * ROWS * WIDTH if how is compressed else (LAYERS - 3) * ROWS * WIDTH
    assert leaves <= stays - saved
    assert leaves < half < stays
    assert half == pytest.approx((leaves + stays) / 2, rel=0.1)


SIZE, COUNT = 1024, 8
BUCKET = SIZE * SIZE * 4  # bytes of one weight


def steps_with(optimizer: Any, model: nn.Module, clips: bool = False) -> Any:
    x = torch.zeros(16, SIZE)

    def step() -> None:
        model(x).sum().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def stack_and_optimizer(place: str, **options: Any) -> tuple[nn.Module, Any]:
    with torch.device(place):
        model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(COUNT)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return model, vramx.offload_optimizer(optimizer, bucket=BUCKET, **options)


def predicted(model: nn.Module, optimizer: Any, clips: bool = False) -> float:
    """Return the peak in weights."""
    return peak(steps_with(optimizer, model, clips)) / BUCKET


# Weights, three slots of two states, and what a step of one weight takes: 1 or 2 of its size.
AT_ONCE = COUNT + 3 * 2


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_states_that_wait_on_the_host_are_not_on_the_gpu(place: str) -> None:
    assert AT_ONCE + COUNT < predicted(*stack_and_optimizer(place)) < AT_ONCE + COUNT + 3
    assert predicted(*stack_and_optimizer(place), clips=True) < AT_ONCE + COUNT + 3
    kept = predicted(*stack_and_optimizer(place, keep=4 * BUCKET))
    assert kept == pytest.approx(predicted(*stack_and_optimizer(place)) + 4, abs=0.1)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_gradients_go_as_they_are_stepped_in_backward(place: str) -> None:
    assert AT_ONCE < predicted(*stack_and_optimizer(place, in_backward=True)) < AT_ONCE + 4


def test_an_offloaded_optimizer_goes_on_after_a_prediction() -> None:
    runs = []
    for predicts in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(SIZE, 256), nn.Linear(256, 256))
        optimizer = vramx.offload_optimizer(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            model(torch.ones(4, SIZE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if predicts:
                vramx.predict(steps_with(optimizer, model))
        runs.append([p.detach() for p in model.parameters()])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_states_that_are_there_wait_on_the_host_too() -> None:
    model, optimizer = stack_and_optimizer("cpu", in_backward=True)
    step = steps_with(optimizer, model)
    before = predicted(model, optimizer)
    step()
    assert predicted(model, optimizer) == pytest.approx(before, abs=0.1)


def test_buckets_that_have_a_link_are_predicted_as_those_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without, optimizer = stack_and_optimizer("cpu", in_backward=True)
    expected = predicted(without, optimizer)
    use(LateLink(), monkeypatch)
    model, optimizer = stack_and_optimizer("cpu", in_backward=True)
    step = steps_with(optimizer, model)
    step()  # its states wait on the host, and its parameters have hooks
    assert predicted(model, optimizer) == pytest.approx(expected, abs=0.1)
    step()


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_model_with_an_offloaded_optimizer_is_predicted_as_its_step(in_backward: bool) -> None:
    model, optimizer = stack_and_optimizer("cpu", in_backward=in_backward)
    found = peak(model, torch.zeros(16, SIZE), optimizer=optimizer) / BUCKET
    assert found == pytest.approx(predicted(model, optimizer), abs=0.1)
