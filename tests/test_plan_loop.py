"""Plans of a training loop on a host: with the optimizer's states and step, none is exceeded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optimizer_tools import LateLink, link
from plan_tools import PACKED_ROWS, Stack, counted_time
from torch import Tensor, nn

import vramx
from vramx.errors import InvalidValueError
from vramx.optimizers.slots import SLOTS
from vramx.optimizers.stepped import Stepped
from vramx.planning.meters import HostMeter
from vramx.planning.states import cost_of, tensors_of

__all__ = ["counted_time", "link"]
pytestmark = pytest.mark.usefixtures("seeded", "counted_time")

# Predictions for a host are exact but for scalars of a few bytes.
EXACT = 1e-3
LEVELS = ("left", "int8", "recompute_all")
STEPS = 3


class Factored(torch.optim.Optimizer):
    """Keeps a mean square of each row and column, and a momentum of one byte a weight."""

    def __init__(self, parameters: Any, rate: float = 1e-3) -> None:
        super().__init__(parameters, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["rate"])

    def _update(self, parameter: Tensor, rate: float) -> None:
        state, square = self.state[parameter], parameter.grad.square()  # type: ignore[union-attr]
        if not state:
            state["means"] = [torch.zeros_like(m) for m in self._means(square)]
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.int8)
        scale = torch.zeros_like(parameter)
        for kept, mean in zip(state["means"], self._means(square), strict=True):
            kept.lerp_(mean, 0.1)
            scale += kept
        parameter.sub_(parameter.grad * rate / scale.sqrt_().add_(1e-3))

    def _means(self, square: Tensor) -> list[Tensor]:
        return [square.mean(d, keepdim=True) for d in range(square.dim())]


class InObjects(Factored):
    """Has its momentum in an object of its own."""

    def _update(self, parameter: Tensor, rate: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = SimpleNamespace(value=torch.zeros_like(parameter))
        parameter.sub_(state["momentum"].value.lerp_(parameter.grad, 0.1), alpha=rate)


class CountsBeside(Factored):
    """Has the number of its steps among its states, of no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state["steps"] = 0  # type: ignore[index]

    def _update(self, parameter: Tensor, rate: float) -> None:
        super()._update(parameter, rate / (1 + self.state["steps"]))  # type: ignore[index, operator]
        self.state["steps"] += 1  # type: ignore[index, operator]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-3),
    "momentum": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW of all at once": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
    "factored": Factored,
    "in objects": InObjects,
    "counted beside": CountsBeside,
}


def model_and_rows(depth: int = 3, rows: int = PACKED_ROWS // 4) -> tuple[nn.Module, Tensor]:
    return Stack(depth), torch.randn(rows, 8)


def peak_of_loop(
    model: nn.Module, sample: Tensor, make: Callable[[Any], torch.optim.Optimizer], gradients: str
) -> int:
    """Return the peak of some steps of a loop as a user writes it, the first among them."""
    model = copy.deepcopy(model)
    stepped = gradients == "stepped"
    each = {p: make([p]) for p in model.parameters()} if stepped else {}
    every = None if stepped else make(model.parameters())
    meter = HostMeter(model)
    for parameter in each:
        parameter.register_post_accumulate_grad_hook(lambda p: _step_of(each[p]))
    with meter.watching():
        for _ in range(STEPS):
            result = model(sample)
            result.float().mean().backward()
            if every is not None:
                every.step()
                every.zero_grad(set_to_none=gradients == "fresh")
            del result
    return meter.peak_bytes()


def _step_of(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


LOOPS = [(name, "fresh") for name in OPTIMIZERS]
LOOPS += [("AdamW", "accumulated"), ("AdamW", "stepped"), ("factored", "stepped")]


@pytest.mark.parametrize(("name", "gradients"), LOOPS)
def test_no_budget_is_exceeded_in_the_loop(name: str, gradients: str) -> None:
    model, sample = model_and_rows()
    make = OPTIMIZERS[name]
    optimizer = make(model.parameters())
    options: Any = {"levels": LEVELS, "optimizer": optimizer, "gradients": gradients}
    widest = vramx.plan(model, sample, **options)
    low = widest.with_budget(sample, "smallest").measured_bytes
    assert not any(isinstance(key, Tensor) for key in optimizer.state)
    for part in range(3):
        budget = low + (widest.measured_bytes - low) * part // 2
        plan = widest.with_budget(sample, budget).apply()
        peak = peak_of_loop(model, sample, make, gradients)
        plan.undo()
        assert peak <= plan.measured_bytes * (1 + EXACT)
        assert plan.measured_bytes <= budget
        assert peak >= 0.97 * plan.measured_bytes  # what was counted is there


def test_of_a_budget_all_but_a_block_is_used_where_that_is_faster() -> None:
    model, sample = model_and_rows(8)
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
    model, sample = model_and_rows()
    peaks = [
        vramx.plan(model, sample, levels=("left",), gradients=word).measured_bytes
        for word in ("stepped", "fresh", "accumulated")
    ]
    weights = sum(4 * p.numel() for p in model.parameters())
    assert peaks == sorted(peaks)
    assert peaks[2] - peaks[1] > weights / 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_steps_make(name: str) -> None:
    model, sample = model_and_rows(2, 64)
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


def test_a_step_lets_go_of_one_parameters_temporaries_late() -> None:
    """torch's AdamW, one after another: the last one's are there as the next one's come."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    cost = cost_of(optimizer, HostMeter(model))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    meter = HostMeter(model, tensors_of(optimizer.state))
    with meter.watching():
        before = meter.allocated_bytes()
        optimizer.step()
    assert cost.step_bytes == meter.peak_bytes() - before > max(cost.temporary_bytes.values())


def test_schedulers_and_hooks_of_an_optimizer_are_not_run() -> None:
    model, sample = model_and_rows(2, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was run"))
    before = [p.clone() for p in model.parameters()]
    plan = vramx.plan(model, sample, levels=("left",), optimizer=optimizer)
    assert plan.added_bytes >= 8 * sum(p.numel() for p in model.parameters())
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))
    assert scheduler.get_last_lr() == [1e-3]


class LooksBack(Factored):
    """Keeps its last gradients, and in its first step takes more than in others."""

    def _update(self, parameter: Tensor, rate: float) -> None:
        state, grad = self.state[parameter], parameter.grad
        if not state:
            torch.empty(9 * parameter.numel())
        state.setdefault("last", []).append(grad.clone())  # type: ignore[union-attr]
        parameter.sub_(torch.stack(state["last"]).sum(0), alpha=rate)
        del state["last"][:-4]


class KeepsSome(Factored):
    """Keeps a half of each parameter's temporaries until all are stepped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = []
        for parameter in (p for group in self.param_groups for p in group["params"]):
            kept.append(parameter.grad * 2)
            parameter.sub_(kept[-1] * 1e-3)


@pytest.mark.parametrize("make", [LooksBack, KeepsSome])
def test_what_a_step_takes_later_or_at_first_or_of_all_parameters_counts(make: Any) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32 * n, bias=False) for n in (1, 2, 2, 3)))
    optimizer = make(model.parameters())
    cost = cost_of(optimizer, HostMeter(model))
    taken = []
    for _ in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        meter = HostMeter(model, tensors_of(optimizer.state))
        with meter.watching():
            optimizer.step()
        taken.append(meter.peak_bytes() - meter.allocated_bytes())
    assert cost.states_bytes == sum(state.nbytes for state in tensors_of(optimizer.state))
    assert max(taken) <= cost.step_bytes <= 1.01 * max(taken)


def test_a_result_that_a_loop_keeps_while_the_optimizer_steps_counts() -> None:
    model, sample = model_and_rows(2, 64)
    model.head = nn.Linear(64, 1024)
    optimizer = OPTIMIZERS["AdamW of all at once"](model.parameters())
    plan = vramx.plan(model, sample, "smallest", levels=LEVELS, optimizer=optimizer).apply()
    meter = HostMeter(model)
    with meter.watching():
        for _ in range(STEPS):
            result = model(sample)
            result.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert meter.peak_bytes() == pytest.approx(plan.measured_bytes, rel=EXACT)
    assert result.nbytes > 0.05 * plan.measured_bytes


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer around another one, whose states and groups are its."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pytest.fail("it is not to be called")


def test_wrapped_and_several_optimizers_are_counted() -> None:
    model, sample = model_and_rows(2, 64)
    head, rest = list(model.head.parameters()), list(model.embed.parameters())
    several = [Wrapper(torch.optim.SGD(part, 0.1, momentum=0.9)) for part in (head, rest)]
    plan = vramx.plan(model, sample, levels=("left",), optimizer=several)
    assert plan.added_bytes == 4 * sum(p.numel() for p in (*head, *rest))
    assert "Wrapper is around a SGD: what it takes beside that is not counted" in str(plan)


def test_offloaded_optimizer_is_measured_and_left_alone() -> None:
    model, sample = model_and_rows(2, 64)
    plain = torch.optim.AdamW(model.parameters())
    expected = vramx.plan(model, sample, levels=("left",), optimizer=plain).added_bytes
    optimizer = vramx.offload_optimizer(torch.optim.AdamW(model.parameters()))
    before = [p.clone() for p in model.parameters()]
    plan = vramx.plan(model, sample, levels=("left",), optimizer=optimizer)
    assert plan.added_bytes == expected
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state


def test_of_states_that_wait_on_the_host_what_is_on_its_way_counts(link: LateLink) -> None:
    model, sample = model_and_rows(2, 64)
    optimizer = vramx.offload_optimizer(torch.optim.AdamW(model.parameters()), bucket=1, least=1)
    cost = cost_of(optimizer, HostMeter(model))
    largest = max(p.numel() for p in model.parameters())
    states = 2 * 4 * largest  # AdamW's two
    assert (cost.states_bytes, cost.slots_bytes) == (0, SLOTS * states)
    # They come when activations are gone.
    assert vramx.plan(model, sample, levels=("left",), optimizer=optimizer).added_bytes == 0


def test_an_optimizer_that_steps_in_backward_says_so_and_steps_afterwards(link: LateLink) -> None:
    model, sample = model_and_rows(2, 64)
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


def test_states_of_frozen_parameters_are_none() -> None:
    model, _ = model_and_rows(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    meter = HostMeter(model)
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    assert cost_of(optimizer, meter).states_bytes == trained


def test_what_was_counted_is_said() -> None:
    model, sample = model_and_rows(2, 64)
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
    model, sample = model_and_rows(2, 64)
    if isinstance(options.get("optimizer"), type):
        options = {"optimizer": options["optimizer"](model.parameters(), 0.1)}
    with pytest.raises(InvalidValueError, match=text):
        vramx.plan(model, sample, levels=("left",), **options)


def test_an_optimizer_that_has_its_parameters_elsewhere_too_is_refused() -> None:
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    optimizer.blocks = [{"of": parameter} for parameter in net.parameters()]  # type: ignore[attr-defined]
    with pytest.raises(InvalidValueError, match=r"in 'blocks' .* give the bytes of its states"):
        cost_of(optimizer, HostMeter(net))


def test_batches_that_come_to_an_end_are_one_clear_error() -> None:
    batches = iter([torch.ones(4, 8)])
    with pytest.raises(InvalidValueError, match="have come to an end"):
        vramx.plan(nn.Sequential(nn.Linear(8, 8)), lambda model: model(next(batches)).sum())
