"""offload_optimizer: what is computed and kept is what it was, to the bit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_tools import LateLink, expect_alike, link, use, values_of
from torch import nn

import vramx
from vramx.errors import InvalidValueError, VramxWarning
from vramx.optimizers import stream
from vramx.optimizers.states import plain_tensors

__all__ = ["link"]

OPTIONS: dict[str, Any] = {"bucket": 3000, "least": 64}  # counters stay


class CountsInTheGroup(torch.optim.Optimizer):
    """Momentum whose decay is of a count that stands in the group, as schedule-free ones have."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(1 - 1 / group["count"]).add_(p.grad)
                p.sub_(mean, alpha=group["lr"])


class MakesStatesAnew(CountsInTheGroup):
    """Its states are other tensors after each step, and one more after the second."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mean" in state:
                    state["second"] = state["mean"] * 2
                state["mean"] = state.get("mean", 0) * 0.9 + p.grad
                p.sub_(state["mean"] + state.get("second", 0), alpha=group["lr"])


class Mean:
    """A state that is an object with a tensor, as FlashOptim's quantised ones are."""

    def __init__(self, like: torch.Tensor) -> None:
        self.name = "mean"
        self.value: Any = torch.zeros_like(like)


class HasObjects(CountsInTheGroup):
    """Its states are objects. Each second step gives them other tensors, the first in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", Mean(p))
                if group["count"] % 2:
                    mean.value.mul_(0.9).add_(p.grad)
                else:
                    mean.value = mean.value * 0.9 + p.grad
                p.sub_(mean.value, alpha=group["lr"])


class ReplacesInLists(CountsInTheGroup):
    """Its states are lists, which stay, of tensors, which are others after each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                means = self.state[p].setdefault("means", [torch.zeros_like(p)])
                means[0] = means[0] * 0.9 + p.grad
                p.sub_(means[0], alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_one_by_one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "counts_in_the_group": CountsInTheGroup,
    "makes_states_anew": MakesStatesAnew,
    "has_objects": HasObjects,
    "replaces_in_lists": ReplacesInLists,
}


class SumsOverAll(CountsInTheGroup):
    """Scales each step by the norm of all gradients together, as some adaptive ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / norm, alpha=0.01)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24), nn.Conv2d(1, 4, 3), nn.Linear(22, 8)
    )


def parameters_of(network: nn.Module) -> list[nn.Parameter]:
    conv = network[3]  # type: ignore[index]
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    return list(network.parameters())


def give_gradients(
    parameters: list[nn.Parameter], seed: int, *, without: int | None = None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == without else gradient.reshape(parameter.shape)


class Pair:
    """Two trainings that are alike but for where the states are."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.plain = parameters_of(model())
        self.streamed = parameters_of(model())
        self.optimizer = make(self.plain)
        self.offloaded = make(self.streamed)

    def step(self, seed: int, *, without: int | None = None) -> None:
        give_gradients(self.plain, seed, without=without)
        give_gradients(self.streamed, seed, without=without)
        self.optimizer.step()
        self.offloaded.step()

    def expect_alike(self) -> None:
        expect_alike(self.plain, self.streamed)
        expect_alike(values_of(self.optimizer), values_of(self.offloaded))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_streamed_states_are_the_unstreamed_ones_to_the_bit(link: LateLink, name: str) -> None:
    pair = Pair(OPTIMIZERS[name])
    pair.step(0)  # it may have states already
    assert vramx.offload_optimizer(pair.offloaded, **OPTIONS) is pair.offloaded
    for seed in range(1, 6):
        # Every other time a parameter has no gradient, and its bucket may have none at all.
        pair.step(seed, without=4 if seed % 2 else None)
    pair.expect_alike()
    assert link.copies > 0
    assert all(p.grad is not None for p in pair.streamed[:4])


@pytest.mark.parametrize(
    "forgotten", ["main after to the device", "to the device after to the host"]
)
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    link = LateLink(forgotten)
    use(link, monkeypatch)
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    for seed in range(5):
        pair.step(seed)
    with pytest.raises(AssertionError):
        pair.expect_alike()


def test_the_tensors_of_objects_are_on_the_host(link: LateLink) -> None:
    pair = Pair(HasObjects)
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    pair.step(0)
    slabs = [slab.memory for slab in link.pool._slabs]
    ranges = [(slab.data_ptr(), slab.data_ptr() + slab.numel()) for slab in slabs]
    means = [state["mean"] for state in pair.offloaded.state.values()]
    large = [each.value for each in means if each.value.numel() * 4 >= OPTIONS["least"]]
    assert large
    assert all(any(low <= t.data_ptr() < high for low, high in ranges) for t in large)
    before = [id(mean) for mean in means]
    vramx.restore(pair.offloaded)
    assert [id(state["mean"]) for state in pair.offloaded.state.values()] == before
    pair.step(1)
    states = zip(pair.optimizer.state.values(), pair.offloaded.state.values(), strict=True)
    for plain, streamed in states:
        assert torch.equal(plain["mean"].value, streamed["mean"].value)


class InSlots:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class HasSlots(CountsInTheGroup):
    """Its states are objects that no attribute dictionary tells of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", InSlots(torch.zeros_like(p)))
                    mean.value.mul_(0.9).add_(p.grad)
                    p.sub_(mean.value, alpha=group["lr"])


def test_tensors_that_are_not_reached_stay_and_are_told_of_once(link: LateLink) -> None:
    pair = Pair(HasSlots)
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    with pytest.warns(VramxWarning, match="inside of InSlots are not reached") as told:
        pair.step(0)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", VramxWarning)
        pair.step(1)
    expect_alike(pair.plain, pair.streamed)


def test_the_host_has_the_states_and_the_device_three_slots(link: LateLink) -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    pair.step(0)
    slabs = {slab.memory.data_ptr(): slab.size_bytes for slab in link.pool._slabs}
    for state in pair.offloaded.state.values():
        for tensor in plain_tensors(state):
            at = tensor.data_ptr()
            is_small = tensor.numel() * tensor.element_size() < OPTIONS["least"]
            assert is_small != any(start <= at < start + size for start, size in slabs.items())
    held = link.pool.used_bytes
    allocated: list[int] = []
    allocate = link.allocate
    link.allocate = lambda n: (allocated.append(n), allocate(n))[1]  # type: ignore[method-assign]
    pair.step(1)
    assert link.pool.used_bytes == held
    buckets = pair.offloaded._vramx_rounds._streams  # type: ignore[attr-defined]
    largest = max(bucket.nbytes for s in buckets.values() for bucket in s.buckets)
    assert allocated == [largest] * stream.SLOTS


def test_an_error_in_a_step_loses_nothing(link: LateLink) -> None:
    pair = Pair(OPTIMIZERS["adamw_one_by_one"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    for seed in range(2):
        pair.step(seed)
    give_gradients(pair.streamed, 2)
    good = pair.streamed[4].grad
    assert good is not None
    pair.streamed[4].grad = good.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        pair.offloaded.step()
    assert all(p.grad is not None for p in pair.streamed)
    # The two buckets before it were stepped, its own was not.
    give_gradients(pair.plain, 2)
    for p in pair.plain[3:]:
        p.grad = None
    pair.optimizer.step()
    pair.expect_alike()
    for p in pair.streamed[:3]:
        p.grad = None
    pair.streamed[4].grad = good
    pair.offloaded.step()
    give_gradients(pair.plain, 2)
    for p in pair.plain[:3]:
        p.grad = None
    pair.optimizer.step()
    pair.expect_alike()
    assert link.copies


def test_state_dict_resumes_on_both_sides(link: LateLink) -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    pair.step(0)
    buffer = io.BytesIO()
    torch.save(pair.offloaded.state_dict(), buffer)

    def saved() -> Any:
        buffer.seek(0)
        return torch.load(buffer)

    other = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(other.offloaded, **OPTIONS)
    for ours, theirs in ((other.plain, pair.plain), (other.streamed, pair.plain)):
        for p, q in zip(ours, theirs, strict=True):
            p.data.copy_(q.data)
    other.optimizer.load_state_dict(saved())
    other.offloaded.load_state_dict(saved())
    assert link.pool.used_bytes > 0
    for seed in range(1, 4):
        other.step(seed)
        pair.step(seed)
    other.expect_alike()
    expect_alike(other.plain, pair.plain)


def test_its_own_states_can_be_loaded(link: LateLink) -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    pair.step(0)
    held = link.pool.used_bytes
    pair.offloaded.load_state_dict(pair.offloaded.state_dict())
    pair.step(1)
    pair.expect_alike()
    link.pool.collect()
    assert link.pool.used_bytes == held


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_trains_on_and_is_of_its_own(link: LateLink, copied: Callable[[Any], Any]) -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    pair.step(0)
    other = copied(pair.offloaded)
    parameters = [p for group in other.param_groups for p in group["params"]]
    give_gradients(parameters, 1)
    other.step()
    pair.step(1)
    expect_alike(parameters, pair.plain)
    expect_alike(values_of(other), values_of(pair.optimizer))
    assert type(other) is type(pair.offloaded)
    assert link.copies


@pytest.mark.parametrize("is_made_before", [False, True])
def test_schedulers_and_hooks_see_one_step(link: LateLink, is_made_before: bool) -> None:
    parameters = parameters_of(model())
    optimizer = OPTIMIZERS["adamw"](parameters)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    if not is_made_before:
        vramx.offload_optimizer(optimizer, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if is_made_before:
        vramx.offload_optimizer(optimizer, **OPTIONS)
    give_gradients(parameters, 0)
    optimizer.step()
    scheduler.step()  # warns, which is an error in tests, if it saw no step
    assert seen == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.005
    counts = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    vramx.restore(optimizer)
    assert counts
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched") == is_made_before
    assert link.copies


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_what_is_not_finite(link: LateLink, fused: bool) -> None:
    pair = Pair(lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    for optimizer, parameters in ((pair.optimizer, pair.plain), (pair.offloaded, pair.streamed)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for seed in range(4):
            give_gradients(parameters, seed)
            if seed == 2:
                parameters[4].grad = torch.full_like(parameters[4], torch.inf)
            scaler.scale(torch.ones(()))  # what tells it its scale
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
    pair.expect_alike()
    assert link.copies


def test_a_closure_is_called_once(link: LateLink) -> None:
    parameters = parameters_of(model())
    optimizer = vramx.offload_optimizer(OPTIMIZERS["adamw"](parameters), **OPTIONS)
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        give_gradients(parameters, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert link.copies


def test_parameters_that_come_later_are_streamed_too(link: LateLink) -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    pair.step(0)
    held = link.pool.used_bytes
    for optimizer, parameters in (
        (pair.optimizer, pair.plain),
        (pair.offloaded, pair.streamed),
    ):
        parameters.append(nn.Parameter(torch.ones(7, 5)))
        optimizer.add_param_group({"params": [parameters[-1]], "lr": 0.1})
    pair.step(1)
    pair.step(2)
    pair.expect_alike()
    assert link.pool.used_bytes > held


def test_restore_brings_the_states_back(link: LateLink) -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    pair.step(0)
    row = vramx.report(pair.offloaded).rows[0]
    assert row.done == "states wait on the host"
    assert "on the host" in row.effect
    assert len(vramx.restore(pair.offloaded)) == 1
    assert len(vramx.restore(pair.offloaded)) == len(vramx.report(pair.offloaded)) == 0
    assert type(pair.offloaded) is torch.optim.AdamW
    link.pool.collect()
    assert link.pool.used_bytes == 0
    copies = link.copies
    pair.step(1)
    pair.expect_alike()
    assert link.copies == copies


def test_a_full_host_leaves_states_where_they_are(link: LateLink) -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    link.host_is_full = True
    with pytest.warns(VramxWarning, match="more to pin for an optimizer's states") as told:
        pair.step(0)
    assert len(told) == 1
    pair.step(1)
    pair.expect_alike()


def test_the_slots_go_with_the_step_and_wait_for_no_collection_of_garbage(link: LateLink) -> None:
    slots: list[weakref.ref[torch.Tensor]] = []
    allocate = link.allocate

    def noted(nbytes: int) -> torch.Tensor:
        slot = allocate(nbytes)
        slots.append(weakref.ref(slot))
        return slot

    link.allocate = noted  # type: ignore[method-assign]
    network = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = vramx.offload_optimizer(torch.optim.AdamW(network.parameters()), **OPTIONS)
    gc.disable()
    try:
        for _ in range(2):
            network(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        optimizer.state_dict()  # all copies are done
        assert len(slots) == stream.SLOTS
        assert [slot() for slot in slots] == [None] * stream.SLOTS
    finally:
        gc.enable()


def test_an_optimizer_that_sums_over_all_parameters_is_refused(link: LateLink) -> None:
    optimizer = SumsOverAll(parameters_of(model()))
    with pytest.raises(InvalidValueError, match="does not treat each parameter by itself"):
        vramx.offload_optimizer(optimizer)
    with pytest.raises(InvalidValueError, match="as one vector"):
        vramx.offload_optimizer(torch.optim.LBFGS(parameters_of(model())))
    assert link.copies == 0


def test_what_cannot_be_tried_is_refused(link: LateLink) -> None:
    class HasThemTwice(CountsInTheGroup):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            self.all = {"of": list(self.param_groups[0]["params"])}

    parameters = parameters_of(model())
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(InvalidValueError, match=r"cannot be tried on a small model: .* in 'all'"):
        vramx.offload_optimizer(HasThemTwice(parameters))
    expect_alike(before, parameters)
    assert link.copies == 0


def test_one_that_is_made_in_a_way_of_its_own_is_tried(link: LateLink) -> None:
    class Needs(CountsInTheGroup):
        def __init__(self, parameters: Any, *, table: tuple[int, ...]) -> None:
            super().__init__(parameters)
            self.table = table

    pair = Pair(lambda p: Needs(p, table=(1, 2)))
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    for seed in range(3):
        pair.step(seed)
    pair.expect_alike()
    assert link.copies


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((nn.Linear(2, 2),), "no torch.optim.Optimizer"),
        ((3,), "no torch.optim.Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        vramx.offload_optimizer(*arguments)


def test_bad_sizes_are_named() -> None:
    optimizer = OPTIMIZERS["sgd"](parameters_of(model()))
    with pytest.raises(InvalidValueError, match="bucket"):
        vramx.offload_optimizer(optimizer, bucket="many")
    assert type(optimizer) is torch.optim.SGD


def test_a_step_of_its_own_is_refused(link: LateLink) -> None:
    optimizer = OPTIMIZERS["sgd"](parameters_of(model()))
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    with pytest.raises(InvalidValueError, match="a step of its own"):
        vramx.offload_optimizer(optimizer)
    assert link.copies == 0


def test_on_a_host_alone_nothing_moves() -> None:
    pair = Pair(OPTIMIZERS["adamw"])
    vramx.offload_optimizer(pair.offloaded, **OPTIONS)
    for seed in range(3):
        pair.step(seed)
    pair.expect_alike()
