"""Plans of a training loop on a host: with the optimizer's states and step, none is exceeded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from odd_optimizers import Odd, counted_beside, factored, in_an_object, step_in_backward
from optimizer_tools import LateLink, link
from plan_tools import EXACT, PACKED_ROWS, Stack, counted_time, peak_of_loop, rows
from torch import Tensor, nn

import vramx
from vramx.errors import InvalidValueError
from vramx.optimizers.slots import SLOTS
from vramx.optimizers.stepped import Stepped
from vramx.planning.states import tensors_of

__all__ = ["counted_time", "link"]
pytestmark = pytest.mark.usefixtures("seeded", "counted_time")

LEVELS = ("left", "int8", "recompute_all")
ROWS = PACKED_ROWS // 4


def counting(parameters: Any) -> torch.optim.Optimizer:
    optimizer = Odd(parameters, counted_beside)
    optimizer.state["steps"] = 0  # type: ignore[index]
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-3),
    "momentum": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW of all at once": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
    "factored": partial(Odd, change=factored),
    "in objects": partial(Odd, change=in_an_object),
    "counted beside": counting,
}


def run(model: nn.Module, sample: Tensor) -> Tensor:
    """Run forward and backward; return the result, which a loop keeps until the next step."""
    result: Tensor = model(sample)
    result.mean().backward()
    return result


LOOPS = [("AdamW", "fresh"), ("AdamW", "accumulated"), ("AdamW", "stepped")]
OTHERS = [(name, "fresh") for name in OPTIMIZERS if name != "AdamW"] + [("factored", "stepped")]


@pytest.mark.parametrize(
    ("name", "gradients"),
    [*LOOPS, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_no_budget_is_exceeded_in_the_loop(name: str, gradients: str) -> None:
    model, sample = Stack(3), rows(ROWS)
    make = OPTIMIZERS[name]
    optimizer = make(model.parameters())
    options: Any = {"levels": LEVELS, "optimizer": optimizer, "gradients": gradients}
    widest = vramx.plan(model, sample, **options)
    low = widest.with_budget(sample, "smallest").measured_bytes
    assert not any(isinstance(key, Tensor) for key in optimizer.state)
    for part in range(3):
        budget = low + (widest.measured_bytes - low) * part // 2
        plan = widest.with_budget(sample, budget).apply()
        trained = copy.deepcopy(model)
        if gradients == "stepped":
            for parameter in trained.parameters():
                step_in_backward(parameter, make([parameter]))
        learner = None if gradients == "stepped" else make(trained.parameters())
        peak = peak_of_loop(trained, partial(run, trained, sample), learner, gradients)
        plan.undo()
        assert peak <= plan.measured_bytes * (1 + EXACT)
        assert plan.measured_bytes <= budget
        assert peak >= 0.97 * plan.measured_bytes  # what was counted is there


def test_a_budget_is_used_but_for_a_block_where_that_is_faster() -> None:
    model, sample = Stack(8), rows(ROWS)
    options: Any = {"levels": LEVELS, "optimizer": torch.optim.AdamW(model.parameters())}
    widest = vramx.plan(model, sample, **options)
    smallest = widest.with_budget(sample, "smallest")
    for part in range(1, 4):
        budget = smallest.measured_bytes
        budget += (widest.measured_bytes - budget) * part // 4
        plan = widest.with_budget(sample, budget)
        assert plan.measured_bytes <= budget
        assert plan.measured_bytes >= 0.97 * budget or plan.measured_ms == widest.measured_ms


def test_gradients_that_come_as_activations_go_cost_less_than_those_that_stay() -> None:
    model, sample = Stack(3), rows(ROWS)
    peaks = [
        vramx.plan(model, sample, levels=("left",), gradients=word).measured_bytes
        for word in ("stepped", "fresh", "accumulated")
    ]
    weights = sum(4 * p.numel() for p in model.parameters())
    assert peaks == sorted(peaks)
    assert peaks[2] - peaks[1] > weights / 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_steps_make(name: str) -> None:
    model, sample = Stack(2), rows(64)
    optimizer = OPTIMIZERS[name](model.parameters())
    missing = vramx.plan(model, sample, levels=("left",), optimizer=optimizer).added_bytes
    before = {n: p.clone() for n, p in model.named_parameters()}
    model(sample).mean().backward()
    optimizer.step()
    # But for counters of steps: numbers of the host, whatever the model is on.
    states = [state for state in tensors_of(optimizer.state) if state.dim()]
    assert missing == sum(t.untyped_storage().nbytes() for t in states)
    values = [state.clone() for state in tensors_of(optimizer.state)]
    stepped = {n: p.clone() for n, p in model.named_parameters()}
    assert any(not torch.equal(stepped[n], before[n]) for n in before)
    # Now they are there: counted as they are, and nothing is changed.
    there = vramx.plan(model, sample, levels=("left",), optimizer=optimizer)
    assert there.added_bytes == 0
    assert all(map(torch.equal, values, tensors_of(optimizer.state)))
    assert all(torch.equal(p, stepped[n]) for n, p in model.named_parameters())


def test_schedulers_and_hooks_of_an_optimizer_are_not_run() -> None:
    model, sample = Stack(2), rows(64)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was run"))
    before = [p.clone() for p in model.parameters()]
    plan = vramx.plan(model, sample, levels=("left",), optimizer=optimizer)
    assert plan.added_bytes >= 8 * sum(p.numel() for p in model.parameters())
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))
    assert scheduler.get_last_lr() == [1e-3]


def test_a_result_that_a_loop_keeps_while_the_optimizer_steps_counts() -> None:
    model, sample = Stack(2), rows(64)
    model.head = nn.Linear(64, 1024)
    optimizer = OPTIMIZERS["AdamW of all at once"](model.parameters())
    plan = vramx.plan(model, sample, "smallest", levels=LEVELS, optimizer=optimizer).apply()
    peak = peak_of_loop(model, lambda: run(model, sample), optimizer)
    assert peak == pytest.approx(plan.measured_bytes, rel=EXACT)
    assert model(sample).nbytes > 0.05 * plan.measured_bytes


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer around another one, whose states and groups are its."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pytest.fail("it is not to be called")


def test_wrapped_and_several_optimizers_are_counted() -> None:
    model, sample = Stack(2), rows(64)
    head, rest = list(model.head.parameters()), list(model.embed.parameters())
    several = [Wrapper(torch.optim.SGD(part, 0.1, momentum=0.9)) for part in (head, rest)]
    plan = vramx.plan(model, sample, levels=("left",), optimizer=several)
    assert plan.added_bytes == 4 * sum(p.numel() for p in (*head, *rest))
    assert "Wrapper is around a SGD: what it takes beside that is not counted" in str(plan)


def test_offloaded_optimizer_is_measured_and_left_alone() -> None:
    model, sample = Stack(2), rows(64)
    plain = torch.optim.AdamW(model.parameters())
    expected = vramx.plan(model, sample, levels=("left",), optimizer=plain).added_bytes
    optimizer = vramx.offload_optimizer(torch.optim.AdamW(model.parameters()))
    before = [p.clone() for p in model.parameters()]
    plan = vramx.plan(model, sample, levels=("left",), optimizer=optimizer)
    assert plan.added_bytes == expected
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state


def test_an_optimizer_that_steps_in_backward_says_so_and_steps_afterwards(link: LateLink) -> None:
    model, sample = Stack(2), rows(64)
    optimizer = torch.optim.AdamW(model.parameters())
    vramx.offload_optimizer(optimizer, in_backward=True, bucket=1, least=1)
    before = [p.detach().clone() for p in model.parameters()]
    plan = vramx.plan(model, sample, "1GiB", levels=("left",), optimizer=optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    states = [2 * 4 * p.numel() for p in model.parameters()]
    assert plan.added_bytes == SLOTS * max(states) + sum(states)  # there is room for all of them
    assert "for states on their way from the host" in str(plan)
    model(sample).sum().backward()
    assert all(type(p.grad) is Stepped for p in model.parameters())
    assert not any(map(torch.equal, before, model.parameters()))
    with pytest.raises(InvalidValueError, match="steps in backward"):
        vramx.plan(model, sample, optimizer=optimizer, gradients="accumulated")


def test_what_was_counted_is_said() -> None:
    model, sample = Stack(2), rows(64)
    optimizer = torch.optim.AdamW(model.parameters())
    options: Any = {"levels": ("left",), "optimizer": optimizer, "reserve": "1MiB"}
    plan = vramx.plan(model, sample, **options)
    said = r"counted are .* of states of AdamW that do not exist yet and 1\.00 MiB reserved"
    assert plan.added_bytes > 1 << 20
    with pytest.raises(InvalidValueError, match=said):
        vramx.plan(model, sample, 1 << 20, **options)
    assert "of states of AdamW" in str(plan)


class Closed(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class HasModes(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError("call train() first, " + 9 * "as this optimizer was told, " + "at last")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradients": "none"}, "gradients 'none' is not accepted"),
        ({"optimizer": 3}, "optimizer 3 is not accepted"),
        ({"optimizer": ["AdamW"]}, "optimizer 'AdamW' is not accepted"),
        ({"optimizer": "adam"}, "optimizer 'adam' is not accepted"),
        ({"optimizer": Closed}, "Closed takes cannot be measured.*as reserve"),
        ({"optimizer": HasModes}, r"measured \(RuntimeError: call train\(\) first.*as reserve"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], text: str) -> None:
    model, sample = Stack(2), rows(64)
    if isinstance(options.get("optimizer"), type):
        options = {"optimizer": options["optimizer"](model.parameters(), 0.1)}
    with pytest.raises(InvalidValueError, match=text):
        vramx.plan(model, sample, levels=("left",), **options)
