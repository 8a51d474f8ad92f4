"""vramx.fit_batch leaves a training as it was: weights, gradients, states, generators, notes."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from fit_tools import Device
from odd_optimizers import Odd, in_a_queue, in_an_object, in_the_group, in_the_optimizer
from torch import nn

from vramx.errors import InvalidValueError
from vramx.planning.fit import fit_batch


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("began", [False, True], ids=["new", "under way"])
def test_the_state_of_a_training_is_bit_for_bit_what_it_was(began: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    model[0].calls = []

    def step(batch: int) -> None:
        model.train()
        model[0].calls.append(batch)
        model(torch.randn(batch, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        random.random()

    if began:
        step(4)
    model.eval()

    def state() -> Any:
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        states = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
        flags = [[module.training for module in model.modules()], model[0].calls]
        generators = (torch.get_rng_state(), random.getstate())
        return copy.deepcopy((states, gradients, flags, generators))

    before, tensors = state(), [p.data_ptr() for p in model.parameters()]
    fit_batch(step, memory=Device(), start=2, max=8)
    assert_same(state(), before)
    assert [p.data_ptr() for p in model.parameters()] == tensors
    step(4)  # it goes on


def test_what_a_step_refers_to_beside_models_is_put_back() -> None:
    weight, device = nn.Parameter(torch.ones(4, 4)), Device()
    average, noise = {"weight": torch.ones(4, 4)}, torch.Generator()
    dataset = torch.ones(8, 8)  # more than the weights
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(batch: int) -> None:
        device.take(batch)
        dataset.zero_()
        (torch.randn(batch, 4, generator=noise) @ weight).sum().backward()
        optimizer.step()
        average["weight"].lerp_(weight.detach(), 0.5)

    before = noise.get_state()
    fit_batch(step, memory=device, max=8)
    assert torch.equal(weight, torch.ones(4, 4))
    assert torch.equal(average["weight"], torch.ones(4, 4))
    assert not dataset.any()
    assert weight.grad is None
    assert torch.equal(noise.get_state(), before)


def test_tensors_that_cannot_be_put_back_are_left() -> None:
    model = nn.Linear(4, 1)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    others = [nested, torch.ones(1).expand(5), torch.eye(3).to_sparse()]

    def step(batch: int) -> None:
        model(torch.ones(batch, 4)).sum().backward()
        assert others

    fit_batch(step, memory=Device(), max=2)


def test_a_model_without_memory_is_named() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(InvalidValueError, match=r"weight is on the meta device.*vramx\.predict"):
        fit_batch(lambda _: model, memory=Device())


def test_sparse_gradients_and_states_are_put_back() -> None:
    model, device = nn.Embedding(100, 8, sparse=True), Device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: int) -> None:
        device.take(batch)
        model(torch.randint(100, (batch,))).sum().backward()
        optimizer.step()

    step(4)
    gradient, state = model.weight.grad, optimizer.state[model.weight]["momentum_buffer"]
    kept = [each.clone() for each in (gradient, state, model.weight)]
    fit_batch(step, memory=device, margin=0.0, max=16)
    assert model.weight.grad is gradient
    assert optimizer.state[model.weight]["momentum_buffer"] is state
    for found, expected in zip((gradient, state, model.weight), kept, strict=True):
        assert torch.equal(found.to_dense(), expected.to_dense())
        assert not found.is_sparse or found._nnz() == expected._nnz()


@pytest.mark.parametrize("began", [False, True], ids=["new", "under way"])
@pytest.mark.parametrize(
    "change", [in_an_object, in_a_queue, in_the_group, in_the_optimizer], ids=lambda f: f.__name__
)
def test_an_optimizer_goes_on_as_if_there_had_been_no_trial(change: Any, began: bool) -> None:
    def training(tries: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer = Odd(model.parameters(), change)

        def step(batch: int) -> None:
            model.zero_grad()
            model(torch.ones(batch, 4)).square().sum().backward()
            optimizer.step()

        if began:
            step(2)
        if tries:
            fit_batch(step, memory=Device(), start=2, max=8)
        step(2)
        step(3)
        return model

    assert torch.equal(training(True).weight, training(False).weight)


def test_other_errors_are_the_callers_and_the_state_is_put_back() -> None:
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())

    def step(batch: int) -> None:
        with torch.no_grad():
            model.weight.fill_(batch)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        fit_batch(step, memory=Device())
    assert_same(model.state_dict(), before)
