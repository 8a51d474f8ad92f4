"""What vramx.checkpoint says of a region that it cannot make again as it was."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from checkpoint_tools import LEVELS, WIDTH, activation, quiet, seeds
from torch import Tensor, nn

import vramx
from vramx import errors
from vramx.compression import enclosing
from vramx.errors import ModifiedInPlaceError, RecomputationError, VramxWarning

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

CHECKPOINT = functools.partial(vramx.checkpoint, level="keep")


class Takes(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * number_of(next(self.source))


def number_of(item: Any) -> float:
    return float(item if isinstance(item, (float, str)) else item[0])


class Loader:
    """Refuses to be copied, as iterators of torch's DataLoader do."""

    def __init__(self) -> None:
        self.items = iter([1.0, 2.0])

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> float:
        return next(self.items)

    def __getstate__(self) -> Any:
        raise NotImplementedError


# -- Switches -------------------------------------------------------------------------------------

MODE, COUNTS, TABLE = "sine", {"calls": 0}, {"by": 1.0, "others": [1]}


class Options:
    factor = 1.0


def by_mode(x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return x.sin() if MODE == "sine" else x.cos()


class Switched(nn.Module):
    shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(by_mode(x)) + self.shift

    def scaled(self, x: Tensor) -> Tensor:
        return x * Options.factor * TABLE["by"]


SET: dict[str, tuple[Any, str, Any]] = {
    "a global of a helper": (None, "MODE", "cosine"),
    "a class": (Options, "factor", 2.0),
    "a module's own class": (Switched, "shift", 1.0),
    "an entry": (TABLE, "by", 2.0),
    "what the call counts": (COUNTS, "calls", 7),
    "nothing that it reads": (Options, "other", 1.0),
}


@contextlib.contextmanager
def switched(name: str) -> Iterator[None]:
    """Set a switch meanwhile."""
    place, key, value = SET[name]
    names = globals() if place is None else place
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(names, dict):
            patch.setitem(names, key, value)
        else:
            patch.setattr(names, key, value, raising=False)
        yield


@pytest.mark.parametrize("until", ["forward is over", "backward is over"])
@pytest.mark.parametrize("name", SET)
def test_a_switch_that_changes_before_backward_is_told_of(
    name: str, until: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_said", set())
    net = nn.Sequential(Switched(), Switched())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with switched(name):
            y = CHECKPOINT(net, activation())
            if until == "backward is over":
                y.sum().backward()
        if until == "forward is over":
            y.sum().backward()
    told = [str(each.message) for each in seen if each.category is VramxWarning]
    reads = name not in ("what the call counts", "nothing that it reads")
    assert len(told) == (reads and until == "forward is over"), told
    assert all(f"{SET[name][1]}" in each or "TABLE" in each for each in told)


# Iterators without copies, of which no one else can be had.
SOURCES: dict[str, Callable[[], Iterator[Any]]] = {
    "generator": lambda: (float(i) for i in range(4)),
    "pairwise": lambda: itertools.pairwise([1.0, 2.0, 3.0]),
    "callable_iterator": lambda: iter(iter([1.0, 2.0]).__next__, None),
    "reader": lambda: csv.reader(["1", "2"]),
    "zip": lambda: zip((i for i in "12"), "34", strict=True),
    "enumerate": lambda: enumerate(Loader()),
    "Loader": Loader,
}
if sys.version_info >= (3, 14):
    SOURCES |= {
        "chain": lambda: itertools.chain([1.0], [2.0]),
        "cycle": lambda: itertools.cycle([1.0, 2.0]),
        "count": lambda: itertools.count(1.0),
        "islice": lambda: itertools.islice(map(float, "123"), 2),
        "product": lambda: itertools.product([1.0], [2.0, 3.0]),
    }
# Those that tell how far they are.
SEEN = SOURCES.keys() - {"callable_iterator", "reader", "zip", "enumerate", "cycle"}


class Handled(nn.Module):
    """Computes more within a library's handlers, which are gone when backward runs."""

    entered: ClassVar[list[str]] = []

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        if self.entered:
            x = x.sin() if x.shape == self.shape else x.view(self.shape)
        return (x * 2).exp()


@pytest.mark.skipif(not enclosing.is_told(), reason="torch's own checkpoint has its own error")
@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize(
    ("shape", "saved"), [((4, WIDTH), "1 tensors.* 2"), ((WIDTH, 4), r"shape \[4, 64\]")]
)
def test_that_a_recomputation_took_another_way_names_the_region_and_what_to_do(
    shape: tuple[int, ...], saved: str
) -> None:
    region, x = Handled(shape), torch.randn(4, WIDTH, requires_grad=True)
    Handled.entered.append("replay")
    y = CHECKPOINT(region, x)
    Handled.entered.clear()
    with pytest.raises(RecomputationError, match=f"Handled saved .*{saved}.*leave Handled out"):
        y.sum().backward()


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("way", ["argument", "closure", "attribute"])
def test_an_iterator_without_copies_that_a_region_reaches_is_told_of(way: str, kind: str) -> None:
    if (way, kind) == ("closure", "Loader"):
        pytest.skip("what an object that is closed over has is set back")
    source = SOURCES[kind]()
    region, given = {
        "argument": (lambda x, source: x.sin() * number_of(next(source)), [source]),
        "closure": (lambda x: x.sin() * number_of(next(source)), []),
        "attribute": (Takes(source), []),
    }[way]
    with pytest.warns(VramxWarning, match=f"reaches a {kind}, which cannot be copied"):
        CHECKPOINT(region, activation(8, WIDTH), *given)


@pytest.mark.parametrize("kind", sorted(SEEN))
def test_an_iterator_that_no_call_takes_from_is_not_told_of(kind: str) -> None:
    region = Takes(iter([1.0]))
    region.unused = SOURCES[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CHECKPOINT(region, activation(8, WIDTH))


def test_a_tensor_of_a_function_that_it_writes_into_is_told_of() -> None:
    mean = torch.zeros(WIDTH)

    def region(x: Tensor) -> Tensor:
        mean.lerp_(x.detach().mean(0), 0.1)
        return (x - mean).square()

    with pytest.warns(VramxWarning, match="region under vramx.checkpoint writes into a tensor"):
        CHECKPOINT(region, activation(8, WIDTH))


def add_to(sums: dict[str, Tensor], x: Tensor) -> None:
    """Add to what an earlier call put there."""
    if "x" in sums:
        sums["x"].add_(x.detach().sum(0))
    else:
        sums["x"] = x.detach().sum(0)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.sums: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        add_to(self.sums, y)
        return y.square() + self.sums["x"]

    def note(self, _: nn.Module, args: tuple[Tensor, ...], name: str) -> None:
        assert name
        add_to(self.sums, *args)


def noted_by_a_hook() -> tuple[nn.Module, dict[str, Tensor]]:
    net, sums = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Sums()
    net[1].register_forward_pre_hook(functools.partial(sums.note, name="tanh"))
    return net, sums.sums


def noted_by_the_module() -> tuple[nn.Module, dict[str, Tensor]]:
    sums = Sums()
    return sums, sums.sums


@pytest.mark.parametrize("make", [noted_by_a_hook, noted_by_the_module])
def test_a_tensor_that_a_later_call_is_the_first_to_add_to_is_told_of(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
) -> None:
    module, sums = make()
    CHECKPOINT(module, activation()).sum().backward()
    with pytest.warns(VramxWarning, match="writes into a tensor that sums of Sums holds"):
        y = CHECKPOINT(module, activation())
    y.sum().backward()
    # The calls that follow, and no recomputation of theirs, add to it.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            before = sums["x"].clone()
            y = CHECKPOINT(module, activation())
            once = sums["x"] - before
            y.sum().backward(retain_graph=True)
            y.sum().backward()
            assert torch.equal(sums["x"] - before, once)


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "closed over"])
def test_a_tensor_in_a_container_that_a_hook_adds_to_is_told_of(is_given: bool) -> None:
    sums = {"x": torch.zeros(WIDTH)}
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    note = functools.partial(add_to, sums) if is_given else lambda y: add_to(sums, y)
    net[0].register_forward_hook(lambda _, __, y: note(y))
    with pytest.warns(VramxWarning, match="writes into a tensor that it closes over"):
        CHECKPOINT(net, activation())


class ShrinksLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.layer.weight.mul_(0.5)
        return self.layer(x)


def test_that_a_later_call_is_the_first_to_write_into_a_parameter_is_said() -> None:
    module = ShrinksLater()
    CHECKPOINT(module, activation())
    with pytest.warns(VramxWarning, match="weight of Linear, which is no buffer"):
        CHECKPOINT(module, activation())


class Steps(nn.Module):
    """Follows its input, by steps of an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(WIDTH))
        self.optimizer = torch.optim.SGD([self.code], lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        (x.detach() - self.code).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (x - self.code).square()


@LEVELS
def test_that_a_region_steps_an_optimizer_is_told_of_once(level: Any) -> None:
    module = Steps()
    with pytest.warns(VramxWarning, match=r"SGD.step\(\) within a region under vramx.checkpoint"):
        vramx.checkpoint(module, activation(), level=level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vramx.checkpoint(module, activation(), level=level)


def test_a_step_of_another_thread_is_not_taken_for_the_regions() -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    weight.grad = torch.ones(WIDTH)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def region(x: Tensor) -> Tensor:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        return x.sin()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vramx.checkpoint(region, activation(8, WIDTH), level=vramx.Compression(min_bytes=0))
    assert torch.equal(weight.detach(), torch.full((WIDTH,), 0.5))


def refused(said: str) -> AbstractContextManager[Any]:
    """Where torch's own checkpoint recomputes, before torch 2.8, there is the warning alone."""
    return pytest.raises(ModifiedInPlaceError, match=said) if enclosing.is_told() else nullcontext()


@pytest.mark.parametrize("way", ["module", "closure", "recomputed block"])
def test_parameters_that_were_written_into_and_are_saved_are_an_error(way: str) -> None:
    """As in torch where it has kept them; its checkpoint takes the gradient of another function."""
    w, layer = torch.ones(16, requires_grad=True), nn.Linear(16, 16)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    vramx.optimize(block, "recompute_all")
    x = torch.randn(2, 4, 16, requires_grad=True)
    call, parameter = {
        "module": (functools.partial(CHECKPOINT, layer), layer.weight),
        "closure": (functools.partial(CHECKPOINT, lambda x: (x * w).sin()), w),
        "recomputed block": (block, block.linear1.weight),
    }[way]
    y = call(x)
    with torch.no_grad():
        parameter.mul_(2)
    with (
        pytest.warns(VramxWarning, match="ahead of backward"),
        refused("take a step of an optimizer after backward"),
    ):
        y.sum().backward()
    call(x).sum().backward()


def test_a_parameter_that_was_written_into_and_is_not_saved_is_told_of_once() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    for words in ("ahead of backward", ""):
        y = CHECKPOINT(layer, activation())
        with torch.no_grad():
            layer.bias.mul_(2)
        with pytest.warns(VramxWarning, match=words) if words else contextlib.nullcontext():
            y.sum().backward()


def test_a_parameter_that_the_region_writes_itself_is_no_error() -> None:
    net = Target(follows=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum(CHECKPOINT(net, activation()).sum() for _ in range(2)).backward()


class Target(nn.Module):
    """A layer beside one that follows it, by itself or where its program says."""

    def __init__(self, *, follows: bool) -> None:
        super().__init__()
        self.follows, self.fast, self.slow = (
            follows,
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.slow.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def update(self) -> None:
        self.slow.weight.lerp_(self.fast.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.follows:
            self.update()
        return (self.fast(x) - self.slow(x)).square()


def test_a_target_that_moves_ahead_of_backward_is_told_of() -> None:
    net = Target(follows=False)
    loss = CHECKPOINT(net, activation()).sum()
    net.update()
    with (
        pytest.warns(VramxWarning, match="write into them after backward"),
        refused("was written into"),
    ):
        loss.backward()


def test_a_target_that_moves_within_its_region_or_after_backward_is_not_told_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Target(follows=True)
        losses = [CHECKPOINT(net, activation()).sum() for _ in range(3)]
        sum(losses).backward()
        net = Target(follows=False)
        for _ in range(2):
            CHECKPOINT(net, activation()).sum().backward()
            net.update()
