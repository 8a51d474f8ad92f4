"""What an optimizer's states and step take, and what a budget leaves for states that would wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from odd_optimizers import Odd, looking_back
from optimizer_tools import LateLink, link
from plan_tools import PACKED_ROWS, Stack, counted_time, rows
from torch import nn

import vramx
from vramx.compression.offload.transport import Lane
from vramx.errors import InvalidValueError
from vramx.optimizers.options import bucket_bytes_of
from vramx.optimizers.slots import SLOTS
from vramx.planning.meters import HostMeter
from vramx.planning.states import cost_of, rounds_of, tensors_of
from vramx.planning.timeline import Cost, Place, Timeline
from vramx.planning.waiting import Waiting, ms_per_byte

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


def test_a_compiled_step_is_measured_and_is_compiled_afterwards() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    @partial(torch.compile, backend=backend, fullgraph=True)
    def change(weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.sub_(gradient * 1e-3)

    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for weight in self.param_groups[0]["params"]:
                change(weight, weight.grad)

    model = nn.Linear(32, 32, bias=False)
    optimizer = Compiled(model.parameters())
    assert cost_of(optimizer, HostMeter(model)).step_bytes == model.weight.nbytes
    give_gradients(model)
    optimizer.step()
    assert len(graphs) == 1


def test_states_of_frozen_parameters_are_none() -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert cost_of(optimizer, HostMeter(model)).states_bytes == trained


def test_states_on_their_way_from_the_host_count_and_those_that_wait_do_not(link: LateLink) -> None:
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


# --- states that would wait on the host -----------------------------------------------------------


def test_states_have_what_the_budget_leaves_while_the_plan_is_applied(link: LateLink) -> None:
    model, sample = Stack(2), rows(64)
    optimizer = torch.optim.AdamW(model.parameters())
    vramx.offload_optimizer(optimizer, in_backward=True, bucket=1, least=1)
    whole = vramx.plan(model, sample, "1GiB", levels=("left",), optimizer=optimizer)
    states = sum(2 * 4 * p.numel() for p in model.parameters())
    room = 40_000
    budget = whole.needed_bytes - states + room
    plan = vramx.plan(model, sample, budget, levels=("left",), optimizer=optimizer)
    assert plan.needed_bytes == budget
    assert f"vramx.offload_optimizer(optimizer, keep={room})" in plan.code
    assert "of states that need not wait there" in str(plan)
    plan.apply()
    model(sample).sum().backward()
    optimizer.step()
    rounds = rounds_of(optimizer)
    assert rounds is not None
    (stream,) = rounds._streams.values()
    assert 0 < stream.kept_bytes <= room
    vramx.restore(model)
    plan.apply()  # once more is not twice as much
    assert 0 < stream.kept_bytes <= room
    plan.undo()
    assert stream.kept_bytes == 0


@pytest.mark.parametrize(("bucket", "like"), [(1, "stepped"), (1 << 30, "fresh")])
def test_gradients_of_a_bucket_wait_for_its_last(link: LateLink, bucket: int, like: str) -> None:
    model, sample = Stack(3), rows(PACKED_ROWS // 4)
    expected = vramx.plan(model, sample, levels=("left",), gradients=like)
    optimizer = torch.optim.AdamW(model.parameters())
    vramx.offload_optimizer(optimizer, in_backward=True, bucket=bucket, least=1)
    plan = vramx.plan(model, sample, levels=("left",), optimizer=optimizer)
    assert plan.measured_bytes - plan.added_bytes == pytest.approx(expected.measured_bytes, 1e-3)


def test_buckets_are_as_large_as_the_largest_parameter_within_bounds() -> None:
    sizes = [[1 << 10], [100 << 20, 1 << 10], [1 << 30]]
    of = [[torch.empty(n, dtype=torch.uint8, device="meta") for n in each] for each in sizes]
    assert [bucket_bytes_of(each) >> 20 for each in of] == [64, 100, 256]


@pytest.mark.parametrize(("bucket", "count"), [(0, 4), (None, 1)])
def test_a_bucket_of_no_bytes_has_one_parameter(
    link: LateLink, bucket: int | None, count: int
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = vramx.offload_optimizer(torch.optim.AdamW(model.parameters()), bucket=bucket)
    rounds = rounds_of(optimizer)
    assert rounds is not None
    assert len(rounds.buckets()) == count


@pytest.mark.parametrize(
    ("rate", "hidden", "limit"), [(0.0, 0.0, 16), (1.0, 0.0, 12), (1.0, 10.0, 16)]
)
def test_a_link_that_is_waited_for_has_memory_go_to_states(
    rate: float, hidden: float, limit: int
) -> None:
    """Two blocks take 2 ms within 16 bytes, 3 within 12, where 4 ms of copies are saved."""
    costs = {
        "keep": Cost(8, False, False, 8, 0, 1.0, 0.0),
        "int8": Cost(4, False, False, 8, 0, 2.0, 0.0),
    }
    timeline = Timeline([Place(0, costs), Place(1, costs)], [0, 0, 0])
    assert Waiting(16, rate, hidden).limit_beside(timeline, 16) == limit
    assert Waiting(16, rate, hidden).limit_beside(timeline, float("inf")) == float("inf")
    assert Waiting().limit_beside(timeline, 16) == 16


def test_the_link_is_measured_in_both_directions_at_once(link: LateLink) -> None:
    copied = link.done.copy()
    assert ms_per_byte(torch.device("cpu"), 4096) * 4096 == pytest.approx(5.0)
    assert len({link.done[lane] - copied[lane] for lane in Lane}) == 1
    link.pool.collect()
    assert link.pool.used_bytes == 0


def test_a_host_that_has_no_memory_to_pin_has_no_speed(link: LateLink) -> None:
    link.host_is_full = True
    assert ms_per_byte(torch.device("cpu"), 4096) == 0.0
