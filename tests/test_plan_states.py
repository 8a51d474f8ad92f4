"""What an optimizer's states and step take of memory, as a plan counts them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from odd_optimizers import Odd, looking_back
from optimizer_tools import LateLink, link
from plan_tools import Stack, counted_time, rows
from torch import nn

import vramx
from vramx.errors import InvalidValueError
from vramx.optimizers.slots import SLOTS
from vramx.planning.meters import HostMeter
from vramx.planning.states import cost_of, tensors_of

__all__ = ["counted_time", "link"]
pytestmark = pytest.mark.usefixtures("seeded", "counted_time")


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_a_step_lets_go_of_one_parameters_temporaries_late() -> None:
    """torch's AdamW, one after another: the last one's are there as the next one's come."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    cost = cost_of(optimizer, HostMeter(model))
    give_gradients(model)
    optimizer.step()
    meter = HostMeter(model, tensors_of(optimizer.state))
    with meter.watching():
        before = meter.allocated_bytes()
        optimizer.step()
    assert cost.step_bytes == meter.peak_bytes() - before > max(cost.temporary_bytes.values())


class KeepsSome(torch.optim.SGD):
    """Keeps a half of each parameter's temporaries until all are stepped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = []
        for parameter in (p for group in self.param_groups for p in group["params"]):
            kept.append(parameter.grad * 2)
            parameter.sub_(kept[-1] * 1e-3)


@pytest.mark.parametrize("make", [partial(Odd, change=looking_back), KeepsSome])
def test_what_a_step_takes_later_or_at_first_or_of_all_parameters_counts(make: Any) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32 * n, bias=False) for n in (1, 2, 2, 3)))
    optimizer = make(model.parameters())
    cost = cost_of(optimizer, HostMeter(model))
    taken = []
    for _ in range(6):
        give_gradients(model)
        meter = HostMeter(model, tensors_of(optimizer.state))
        with meter.watching():
            optimizer.step()
        taken.append(meter.peak_bytes() - meter.allocated_bytes())
    assert cost.states_bytes == sum(state.nbytes for state in tensors_of(optimizer.state))
    assert max(taken) <= cost.step_bytes <= 1.01 * max(taken)


def test_states_of_frozen_parameters_are_none() -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert cost_of(optimizer, HostMeter(model)).states_bytes == trained


def test_of_states_that_wait_on_the_host_what_is_on_its_way_counts(link: LateLink) -> None:
    model, sample = Stack(2), rows(64)
    optimizer = vramx.offload_optimizer(torch.optim.AdamW(model.parameters()), bucket=1, least=1)
    cost = cost_of(optimizer, HostMeter(model))
    largest = max(p.nbytes for p in model.parameters())
    assert (cost.states_bytes, cost.slots_bytes) == (0, SLOTS * 2 * largest)  # AdamW's two
    # They come when activations are gone.
    assert vramx.plan(model, sample, levels=("left",), optimizer=optimizer).added_bytes == 0


def test_an_optimizer_that_has_its_parameters_elsewhere_too_is_refused() -> None:
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    optimizer.blocks = [{"of": parameter} for parameter in net.parameters()]  # type: ignore[attr-defined]
    with pytest.raises(InvalidValueError, match=r"in 'blocks' .* give the bytes of its states"):
        cost_of(optimizer, HostMeter(net))
