"""offload_optimizer with steps in backward: the same steps, each bucket as soon as it can be."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from optimizer_tools import LateLink, OneByOne, expect_alike, link, values_of
from torch import Tensor, nn

import vramx
from vramx.compression.offload.transport import Lane
from vramx.errors import OffloadError, VramxWarning

__all__ = ["link"]


class Deep(nn.Module):
    """Layers of which one is skipped every other time, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.is_odd, self.skipped = False, (3,)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skipped or self.is_odd:
                x = torch.tanh(layer(x))
        return self.layers[0](x)  # type: ignore[no-any-return]


def train(network: Deep, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[int]:
    """Return how many parameters had a gradient when backward was over, of each step."""
    generator = torch.Generator().manual_seed(2)
    left = []
    for step in range(first, first + steps):
        network.is_odd = step % 2 == 1
        optimizer.zero_grad()
        network(torch.randn(5, 24, generator=generator)).square().sum().backward()
        left.append(sum(type(p.grad) is Tensor for p in network.parameters()))
        optimizer.step()
    return left


def AdamW(network: Deep) -> torch.optim.Optimizer:  # noqa: N802 - as the class
    return torch.optim.AdamW(network.parameters(), lr=0.01)


def offloaded(**options: Any) -> tuple[Deep, torch.optim.Optimizer]:
    network = Deep()
    optimizer = AdamW(network)
    vramx.offload_optimizer(optimizer, in_backward=True, least=64, **options)
    return network, optimizer


class Both:
    """Two trainings of a network that are alike but for the steps in backward of one."""

    def __init__(self, make: Any = AdamW, *, skipped: tuple[int, ...] = (3,), **of: Any) -> None:
        self.plain, self.streamed = Deep(), Deep()
        self.plain.skipped = self.streamed.skipped = skipped
        self.optimizer, self.ours = (make(each) for each in (self.plain, self.streamed))
        vramx.offload_optimizer(self.ours, **{"in_backward": True, "least": 64, **of})

    def train(self, steps: int, first: int = 0) -> list[int]:
        train(self.plain, self.optimizer, steps, first)
        return train(self.streamed, self.ours, steps, first)

    def expect_alike(self) -> None:
        expect_alike(self.plain.parameters(), self.streamed.parameters())
        expect_alike(values_of(self.optimizer), values_of(self.ours))


class CountsWhatItSteps(OneByOne):
    """Counts the steps of groups that have gradients, from the first one on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if any(p.grad is not None for p in group["params"]):
                self.param_groups = [group]
                group.setdefault("count", 0)
                super().step()
        self.param_groups = groups


@pytest.mark.parametrize("cls", [OneByOne, CountsWhatItSteps])
@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("bucket", [1, 5000])
def test_what_groups_count_is_counted_once_a_step(
    link: LateLink, cls: Any, in_backward: bool, bucket: int
) -> None:
    def make(network: Deep) -> Any:
        return cls([{"params": network.layers[at].parameters()} for at in (slice(3), slice(3, 6))])

    both = Both(make, in_backward=in_backward, bucket=bucket)
    for first in (0, 2, 4):
        both.train(2, first)
        for each in (both.optimizer, both.ours):
            each.param_groups[1]["lr"] *= 0.5
            each.param_groups[0]["count"] += first == 2
    both.expect_alike()
    assert [group["count"] for group in both.ours.param_groups] == [7, 6]
    assert [group["count"] for group in both.optimizer.param_groups] == [7, 6]
    assert link.copies


@pytest.mark.parametrize("bucket", [1, 5000, 1 << 30])
def test_steps_in_backward_are_the_same_steps(link: LateLink, bucket: int) -> None:
    both = Both(bucket=bucket)
    left = both.train(6)
    both.expect_alike()
    if bucket == 1:
        assert left == [0] * 6
    assert link.copies


def test_the_next_bucket_comes_while_one_is_stepped(link: LateLink) -> None:
    network, optimizer = offloaded(bucket=1)
    train(network, optimizer, 4)
    events: list[str] = []
    copied = link.copy
    link.copy = lambda lane, *of: (events.append(lane.value), copied(lane, *of))  # type: ignore[assignment, method-assign]
    train(network, optimizer, 2)
    # Three come before the first leaves, and then one for each that leaves.
    assert events[:5] == ["to the device"] * 3 + ["to the host", "to the device"]


@pytest.mark.parametrize(("bucket", "skipped"), [(2500, (3,)), (5000, (2, 3))])
def test_the_first_bucket_comes_before_its_gradients_and_slots_stay(
    link: LateLink, bucket: int, skipped: tuple[int, ...]
) -> None:
    both = Both(bucket=bucket, skipped=skipped)
    both.train(3)  # a layer's states have come in vain: it was skipped
    for optimizer in (both.optimizer, both.ours):
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
    link.allocate = None  # type: ignore[method-assign, assignment]
    seen: list[int] = []
    both.streamed.layers[5].weight.register_hook(lambda _: seen.append(link.copies))
    before = link.copies
    both.train(2, first=3)
    both.expect_alike()
    assert seen[0] > before


def test_a_state_that_is_changed_while_it_comes_is_the_changed_one(link: LateLink) -> None:
    both = Both(bucket=2500, skipped=())
    both.train(2)
    copied = link.copy

    def copy_at_once(lane: Lane, target: Tensor, source: Tensor) -> None:
        copied(lane, target, source)
        link.synchronize(link.mark(lane))

    link.copy = copy_at_once  # type: ignore[method-assign]
    for network, each in ((both.plain, both.optimizer), (both.streamed, both.ours)):
        weight = network.layers[3].weight  # which is on its way when layer 4 has its gradient

        def halve(_: Tensor, each: Any = each, weight: Tensor = weight) -> None:
            each.state[weight]["exp_avg"].mul_(0.5)

        network.layers[4].weight.register_hook(halve)
    both.train(2)
    expect_alike(both.plain.parameters(), both.streamed.parameters())
    assert link.copies


def test_a_second_backward_before_the_step_is_refused(link: LateLink) -> None:
    network, optimizer = offloaded(bucket=1)
    network(torch.ones(5, 24)).sum().backward()
    with pytest.raises(OffloadError, match="gradients cannot accumulate"):
        network(torch.ones(5, 24)).sum().backward()
    network.zero_grad()  # which the optimizer does not see
    with pytest.raises(OffloadError, match="gradients cannot accumulate"):
        network(torch.ones(5, 24)).sum().backward()
    with pytest.warns(VramxWarning, match=r"zero_grad\(\) came before step"):
        train(network, optimizer, 2)  # zero_grad() begins anew
    assert link.copies


def test_a_kept_graph_and_zeros_are_said_not_to_be_what_they_were(link: LateLink) -> None:
    network, optimizer = offloaded(bucket=1)
    loss = network(torch.ones(5, 24)).square().sum()
    with pytest.warns(VramxWarning, match="retain_graph=True.*modified"):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    optimizer.step()
    with pytest.warns(VramxWarning, match="set_to_none=False"):
        optimizer.zero_grad(set_to_none=False)
    assert link.copies


NEEDS_ALL: dict[str, Callable[[list[Any]], Any]] = {
    "clipping by the norm": lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    "clipping one by one": lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=False),
    "clipping values": lambda p: nn.utils.clip_grad_value_(p, 1.0),
    "GradScaler": lambda p: torch._amp_foreach_non_finite_check_and_unscale_(
        [each.grad for each in p], torch.zeros(1), torch.ones(1)
    ),
    "a look": lambda p: [each.grad.norm() for each in p],
}


@pytest.mark.parametrize("name", NEEDS_ALL)
def test_what_needs_all_gradients_is_told_that_they_are_no_more(link: LateLink, name: str) -> None:
    network, optimizer = offloaded(bucket=1)
    network.is_odd = True
    network(torch.ones(5, 24)).sum().backward()
    with pytest.raises(OffloadError, match=r"stepped in backward already.*max_grad_norm=0"):
        NEEDS_ALL[name](list(network.parameters()))
    assert "stepped in backward" in repr(network.layers[0].weight.grad)
    optimizer.step()
    assert all(p.grad is None for p in network.parameters())
    assert link.copies


@pytest.mark.parametrize("foreach", [True, False])
def test_a_norm_for_a_log_is_of_the_gradients_that_are_left(link: LateLink, foreach: bool) -> None:
    network, _ = offloaded(bucket=5000)
    network(torch.ones(5, 24)).sum().backward()  # of a bucket that waits for a skipped layer
    left = [p.grad for p in network.parameters() if type(p.grad) is Tensor]
    before = [gradient.clone() for gradient in left]
    expected = torch.stack([gradient.norm() for gradient in left]).norm()
    found = nn.utils.clip_grad_norm_(network.parameters(), float("inf"), foreach=foreach)
    assert left
    torch.testing.assert_close(found, expected)
    expect_alike(left, before)
    assert link.copies


def test_a_loss_for_another_model_is_told_that_it_has_trained_this_one(link: LateLink) -> None:
    judge, optimizer = offloaded(bucket=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(judge, optimizer, 2)
    judge(torch.ones(5, 24)).sum().backward()  # for what made the ones
    with pytest.warns(VramxWarning, match=r"has trained them.*in_backward=False"):
        train(judge, optimizer, 1)
    assert link.copies


def test_nothing_keeps_the_optimizer_or_the_model_alive(link: LateLink) -> None:
    network, optimizer = offloaded()
    train(network, optimizer, 2)
    of_model, of_optimizer = weakref.ref(network), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert of_optimizer() is None
    network(torch.ones(5, 24)).sum().backward()  # its hooks do nothing then
    assert all(p.grad is not None for p in network.layers[1].parameters())
    del network
    gc.collect()
    assert of_model() is None
    link.pool.collect()
    assert link.pool.used_bytes == 0


def test_processes_that_come_later_are_noticed(link: LateLink, monkeypatch: Any) -> None:
    network, optimizer = offloaded()
    train(network, optimizer, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(OffloadError, match="beside other processes"):
        network(torch.ones(5, 24)).sum().backward()
    assert link.copies


class LoopsOverAll(OneByOne):
    """Has a step of one parameter, as FlashOptim's have, and notes what it has looked at."""

    _gradient_release = False
    looks: ClassVar[list[Tensor]] = []

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.step_param(parameter, group)

    @torch.no_grad()
    def step_param(self, p: Tensor, group: dict[str, Any]) -> None:
        self.looks.append(p)
        if p.grad is not None:
            p.sub_(self.change(self.state[p], p.grad, 2), alpha=group["lr"])


@pytest.mark.parametrize("is_known", [True, False])
def test_an_optimizer_that_steps_one_parameter_is_asked_for_those_of_the_bucket(
    link: LateLink, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_known:
        monkeypatch.setattr(LoopsOverAll.step, "__module__", "flashoptim.optimizers")
        monkeypatch.setattr(LoopsOverAll.step, "__qualname__", "FlashOptimizer.step")
    # What is known of a class is found out once.
    cls = type("Loops", (LoopsOverAll,), {})
    both = Both(lambda network: cls(network.parameters()), bucket=5000)
    LoopsOverAll.looks.clear()
    both.train(4)
    both.expect_alike()
    # Those of the plain training, and of ours.
    assert (len(LoopsOverAll.looks) <= 2 * 4 * len(list(both.plain.parameters()))) is is_known
