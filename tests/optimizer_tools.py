"""What tests of offloaded optimizers share: optimizers, pairs of trainings, and a late link.

The link's copies run as late as they may: one to the device when the main stream waits for it, one
to the host when a copy to the device or the host waits for it. So a wait that is missing reads or
keeps what was there before, which is poison.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vramx
from vramx import errors
from vramx.compression.offload import offload, pinned
from vramx.compression.offload.transport import Lane
from vramx.optimizers.states import plain_tensors

POISON = 0xDD
LEAST_BYTES = 64  # of a state that is moved

Both = Callable[[torch.optim.Optimizer, list[nn.Parameter]], Any]


class LateLink:
    """A transport on the host. `forgets` names a wait that it drops."""

    def __init__(self, forgets: str = "") -> None:
        self.forgets = forgets
        self.host_is_full = False
        self.pending: dict[Lane, list[Callable[[], Any]]] = {lane: [] for lane in Lane}
        self.done: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self.copies = 0
        self.allocated: list[tuple[int, weakref.ref[Tensor]]] = []
        self.pool = pinned.HostPool(self.pin, 1 << 40)
        self.transport = self
        self.lock = threading.Lock()

    def stream(self) -> str:
        return "main"

    def capturing(self) -> bool:
        return False

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the host's memory."""
        slabs = [slab.memory for slab in self.pool._slabs]
        at = tensor.data_ptr()
        return any(slab.data_ptr() <= at < slab.data_ptr() + slab.numel() for slab in slabs)

    def allocate(self, nbytes: int) -> Tensor:
        slot = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.allocated.append((nbytes, weakref.ref(slot)))
        return slot

    def pin(self, nbytes: int) -> Tensor:
        if self.host_is_full:
            raise RuntimeError("no more memory to pin")
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def mark(self, place: Any, *, timed: bool = False) -> tuple[Any, int]:
        of_lane = isinstance(place, Lane)
        return place, self.done[place] + len(self.pending[place]) if of_lane else 0

    def wait(self, place: Any, event: tuple[Any, int]) -> None:
        name = f"{getattr(place, 'value', place)} after {getattr(event[0], 'value', event[0])}"
        if name == self.forgets:
            return
        if place == "main":
            self.synchronize(event)
        elif event[0] != "main":
            self.pending[place].append(lambda: self.synchronize(event))

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        self.pending[lane].append(lambda: target.copy_(source))

    def used_by(self, memory: Tensor, place: Any) -> None: ...

    def milliseconds(self, start: Any, end: Any) -> float:
        return 5.0

    def synchronize(self, event: tuple[Any, int]) -> None:
        lane, count = event
        while lane != "main" and self.done[lane] < count:
            self.done[lane] += 1
            self.pending[lane].pop(0)()


def use(link: LateLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "link_of", lambda _: link)
    # Slabs of LateLink are filled, which takes time.
    monkeypatch.setattr(pinned, "_SMALLEST_SLAB_BYTES", 1 << 16)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateLink]:
    made = LateLink()
    use(made, monkeypatch)
    errors._said.clear()
    yield made
    made.pool.check()


def values_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = sorted(optimizer.state_dict()["state"].items())
    return [t.clone() for _, state in states for t in plain_tensors(state)]


def expect_alike(a: Any, b: Any) -> None:
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left, right)


class OneByOne(torch.optim.Optimizer):
    """Treats each parameter by itself. The count stands in the group, as in schedule-free ones."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    change = self.change(self.state[p], p.grad, group["count"])
                    p.sub_(change, alpha=group["lr"])

    def change(self, state: Any, grad: Tensor, count: int) -> Tensor:
        """Momentum whose decay is of the count."""
        mean: Tensor = state.setdefault("mean", torch.zeros_like(grad))
        return mean.mul_(1 - 1 / count).add_(grad)


class MakesStatesAnew(OneByOne):
    """Its states are other tensors after each step, and one more after the second."""

    def change(self, state: Any, grad: Tensor, count: int) -> Tensor:
        if "mean" in state:
            state["second"] = state["mean"] * 2
        state["mean"] = state.get("mean", 0) * 0.9 + grad
        return state["mean"] + state.get("second", 0)  # type: ignore[no-any-return]


class Mean:
    """A state that is an object with a tensor, as FlashOptim's quantised ones are."""

    def __init__(self, like: Tensor) -> None:
        self.name = "mean"
        self.value: Any = torch.zeros_like(like)


class HasObjects(OneByOne):
    """Its states are objects. Each second step gives them other tensors, the first in place."""

    def change(self, state: Any, grad: Tensor, count: int) -> Tensor:
        mean = state.setdefault("mean", Mean(grad))
        if count % 2:
            mean.value.mul_(0.9).add_(grad)
        else:
            mean.value = mean.value * 0.9 + grad
        return mean.value  # type: ignore[no-any-return]


class InSlots:
    """A state that no attribute dictionary tells of."""

    __slots__ = ("value",)

    def __init__(self, like: Tensor) -> None:
        self.value = torch.zeros_like(like)


class HasSlots(OneByOne):
    def change(self, state: Any, grad: Tensor, count: int) -> Tensor:
        mean: InSlots = state.setdefault("mean", InSlots(grad))
        return mean.value.mul_(0.9).add_(grad)


class ReplacesInLists(OneByOne):
    """Its states are lists, which stay, of tensors, which are others after each step."""

    def change(self, state: Any, grad: Tensor, count: int) -> Tensor:
        means: list[Tensor] = state.setdefault("means", [torch.zeros_like(grad)])
        means[0] = means[0] * 0.9 + grad
        return means[0]


class CountsBesideItsTensors(OneByOne):
    """Its states are a list in a dictionary, which has a number as well that a step counts."""

    def change(self, state: Any, grad: Tensor, count: int) -> Tensor:
        held = state.setdefault("held", {"means": [torch.zeros_like(grad), 0]})
        mean: Tensor = held["means"][0]
        held["means"][1] += 1
        return mean.mul_(1 - 1 / held["means"][1]).add_(grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_one_by_one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "counts_in_the_group": OneByOne,
    "makes_states_anew": MakesStatesAnew,
    "has_objects": HasObjects,
    "replaces_in_lists": ReplacesInLists,
    "counts_beside_its_tensors": CountsBesideItsTensors,
}


def parameters() -> list[nn.Parameter]:
    """Return those of a small network, one in another memory format."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.Linear(32, 24), nn.Conv2d(1, 4, 3), nn.Linear(22, 8)
    layers[2].weight.data = layers[2].weight.data.to(memory_format=torch.channels_last)
    return [p for layer in layers for p in layer.parameters()]


def give_gradients(to: list[nn.Parameter], seed: int, *, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(to):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == without else gradient


class Pair:
    """Two trainings that are alike but for where the states are."""

    def __init__(self, make: Any = "adamw", *, offload: bool = True, steps: int = 0) -> None:
        made = OPTIMIZERS[make] if isinstance(make, str) else make
        self.plain, self.streamed = parameters(), parameters()
        self.optimizer, self.offloaded = made(self.plain), made(self.streamed)
        self.sides = (self.optimizer, self.plain), (self.offloaded, self.streamed)
        if offload:
            self.offload()
        self.step(*range(steps))

    def offload(self) -> None:
        """Give the states up in some buckets; counters stay."""
        given = vramx.offload_optimizer(self.offloaded, bucket=3000, least=LEAST_BYTES)
        assert given is self.offloaded

    def step(self, *seeds: int, without: int | None = None) -> None:
        for seed in seeds:
            for optimizer, own in self.sides:
                give_gradients(own, seed, without=without)
                optimizer.step()

    def load(self, state_dict: Any, weights: list[nn.Parameter]) -> None:
        """Resume on both sides from what one of another pair has saved."""
        for optimizer, own in self.sides:
            for p, q in zip(own, weights, strict=True):
                p.data.copy_(q.data)
            optimizer.load_state_dict(copy.deepcopy(state_dict))

    def change(self, change: Both) -> None:
        """Do to both what a program does between two steps."""
        for optimizer, own in self.sides:
            change(optimizer, own)

    def expect_alike(self) -> None:
        expect_alike(self.plain, self.streamed)
        expect_alike(values_of(self.optimizer), values_of(self.offloaded))
