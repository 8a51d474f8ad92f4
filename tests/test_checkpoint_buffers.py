"""A recomputation leaves modules and generators as one forward pass does, and has its gradient."""

from __future__ import annotations

import copy
import functools
import random
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, activation, quiet, seeds
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from uncollected import nothing_waits_for_the_collector

import vramx
from vramx import errors
from vramx.compression.config import Compression
from vramx.errors import VramxWarning
from vramx.recompute.attributes import attributes_as_now

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")


class Average(nn.Module):
    """Takes off a running mean, which it moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
        return (x - self.mean).square()


class Counter(Average):
    """The same with a new tensor in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
        return (x - self.mean).square()


class Unversioned(Average):
    """The same past the version of the buffer, as averages of codebooks are often written."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(x.detach().mean(0), 0.5)
        return (x - self.mean).square()


class Reassigned(Average):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean.data * 0.5 + x.detach().mean(0) * 0.5
        return (x - self.mean).square()


class Viewed(Average):
    """Has a view of a buffer that it moves, as another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("even", self.mean[::2])

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return (x[:, ::2] - self.even).repeat(1, 2).square()


class MadeLate(Average):
    """Makes a buffer, a parameter and a part in its first call, and takes the buffer off again."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = None

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "part"):
            self.part, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        before, self.mean = self.mean, None if self.mean is not None else x.detach().mean(0)
        return (self.part(x) * self.scale - (0.0 if before is None else before)).square()


def observed() -> nn.Module:
    """Fits scales for each channel as it runs, in a kernel that moves no version, and resizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver, -127, 127, qscheme=torch.per_channel_symmetric,
            dtype=torch.qint8, ch_axis=0,
        )  # fmt: skip


class Noting(nn.Module):
    """Notes in its attributes what it has done, and computes with it."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note
        self.calls, self.means, self.state = 0, [torch.ones(())], types.SimpleNamespace(scale=1.0)
        self.last = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.note == "counter":
            self.calls += 1
        elif self.note == "list":
            self.means.append(mean.mean())
        elif self.note == "object":
            self.state.scale *= 1.5
        elif self.note == "tensor":
            self.last = mean
        elif self.note == "tensor in place" and self.last.any():
            self.last.mul_(0.5).add_(mean)
        elif self.note == "tensor in place":
            self.last = mean + 1
        elif self.note == "what was not there":
            x = x * getattr(self, "later", 1.0)
            self.later = 2.0
        scale = (1 + self.calls) * self.state.scale + sum(self.means)
        return (x - self.last).square() * scale


class Drawing(nn.Module):
    """Scales by numbers that torch does not draw, or by a generator of its own."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.own = {
            "numpy's own": lambda: numpy.random.default_rng(0),
            "numpy's old own": lambda: numpy.random.RandomState(0),
            "Python's own": lambda: random.Random(0),
            "torch's own": lambda: torch.Generator().manual_seed(0),
        }.get(source, lambda: None)()

    def forward(self, x: Tensor) -> Tensor:
        if self.source == "torch's own":
            return (x * torch.rand(WIDTH, generator=self.own)).square()
        drawn = {"numpy": numpy.random, "Python": random}.get(self.source, self.own).random()
        return (x * drawn).square() if drawn < 0.5 else (x * drawn).sin()


NOTES = ("counter", "list", "object", "tensor", "tensor in place", "what was not there")
SOURCES = ("numpy", "Python", "numpy's own", "numpy's old own", "Python's own", "torch's own")
MOVING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm with a plain average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, -1)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "power iteration": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "average": Average,
    "average in a new tensor": Counter,
    "average past the version": Unversioned,
    "average in new memory": Reassigned,
    "a view of an average": Viewed,
    "what is made late": MadeLate,
    "quantisation": observed,
    **{note: functools.partial(Noting, note) for note in NOTES},
    **{source: functools.partial(Drawing, source) for source in SOURCES},
}


@pytest.mark.parametrize("name", [name for name in MOVING if name.startswith("average")])
def test_calls_of_new_lengths_leave_no_copies_to_the_collector(name: str) -> None:
    """Each of them is watched."""

    def train(*lengths: int) -> None:
        module = MOVING[name]()
        for length in lengths:
            vramx.checkpoint(module, activation(length, WIDTH), level=SMALL).sum().backward()

    train(6, 7)
    with nothing_waits_for_the_collector():
        train(8, 9)


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("level", [SMALL, "keep"], ids=["int8", "exact"])
@pytest.mark.parametrize("way", ["modules", "function", "lambda"])
def test_what_moves_moves_once_a_step(name: str, level: str | Compression, way: str) -> None:
    ours = nn.Sequential(MOVING[name](), nn.Linear(WIDTH, WIDTH), nn.GELU())
    plain = copy.deepcopy(ours)
    run: Callable[[Tensor], Tensor] = ours
    if way == "modules":
        vramx.checkpoint_modules(ours, where=nn.Sequential, level=level)
    else:
        call = ours if way == "function" else lambda x: ours(x * 1.0)
        run = functools.partial(vramx.checkpoint, call, level=level)
    for step in range(3):
        pair, drawn = [], []
        for model, function in ((plain, plain), (ours, run)):
            torch.manual_seed(step)
            random.seed(step)
            numpy.random.seed(step)
            leaf = torch.randn(16, WIDTH, requires_grad=True)
            model.zero_grad()
            function(leaf * 1.0).square().sum().backward()
            pair.append(leaf.grad)
            drawn.append((random.random(), numpy.random.random()))
        assert drawn[0] == drawn[1]
        assert vars(ours[0]).get("calls") == vars(plain[0]).get("calls")
        for (key, found), expected in zip(ours.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{key} at {step}")
        cosine = F.cosine_similarity(pair[0].flatten(), pair[1].flatten(), dim=0)
        assert cosine > 0.999 if level != "keep" else torch.equal(*pair)


def test_buffers_are_the_modules_own_after_an_early_stop() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    before = {name: id(buffer) for name, buffer in norm.named_buffers()}
    y = vramx.checkpoint(norm, activation(), level=SMALL, early_stop=True)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert {name: id(buffer) for name, buffer in norm.named_buffers()} == before
    assert norm.num_batches_tracked == 1


def test_what_inference_left_in_a_module_tells_no_version() -> None:
    net, x = Average(), activation()
    with torch.inference_mode():
        net.mean = net.seen = torch.ones(WIDTH)
    net.eval()
    y = vramx.checkpoint(lambda x: net(x).sum() + net.seen.mean(), x, level="keep")
    assert torch.equal(*torch.autograd.grad(y, x), 2 * (x - 1))


GLOBAL_NORM = nn.BatchNorm1d(WIDTH)


def named(x: Tensor) -> Tensor:
    return GLOBAL_NORM(x).sin()


def within(x: Tensor) -> Tensor:
    return vramx.checkpoint(GLOBAL_NORM, x.sin(), level=SMALL).sin()


@pytest.mark.parametrize("region", [named, within])
def test_buffers_of_a_module_that_a_function_names_move_once(region: Any) -> None:
    GLOBAL_NORM.reset_running_stats()
    vramx.checkpoint(region, activation(), level=SMALL).sum().backward()
    assert GLOBAL_NORM.num_batches_tracked == 1


class Trainer:
    """Is no module, and has some."""

    def __init__(self) -> None:
        self.norms = {"own": [nn.BatchNorm1d(WIDTH)]}["own"]

    def __call__(self, x: Tensor) -> Tensor:
        return self.norms[0](x).sin()

    def within(self) -> Callable[[Tensor], Tensor]:
        return lambda x: self(x * 1)


@pytest.mark.parametrize("way", ["called", "method", "closure", "dictionary"])
def test_buffers_of_a_module_that_an_object_has_move_once(way: str) -> None:
    trainer = Trainer()
    (norm,) = trainer.norms
    table = {"norm": norm}
    region = {
        "called": trainer,
        "method": trainer.__call__,
        "closure": trainer.within(),
        "dictionary": lambda x: table["norm"](x).sin(),
    }[way]
    vramx.checkpoint(region, activation(), level=SMALL).sum().backward()
    assert norm.num_batches_tracked == 1


def test_buffers_of_a_fused_block_that_is_recomputed_move_once() -> None:
    """Of a part that is called as it is: spectral norm takes a step in each call."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True)
    nn.utils.parametrizations.spectral_norm(layer.linear1)
    fused = copy.deepcopy(layer)
    vramx.optimize(fused, "recompute_all", min_bytes=0)
    x = torch.randn(4, 6, 16)
    for each in (layer, fused):
        for _ in range(2):
            each(x.clone().requires_grad_()).square().sum().backward()
    for (name, one), other in zip(layer.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(other, one, msg=name)


def test_a_fused_block_is_recomputed_with_the_parameters_of_its_call() -> None:
    """They are the module's own again when backward runs."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True)
    x = torch.randn(4, 6, 16)
    found = []
    for level in ("left", "recompute_all"):
        vramx.optimize(layer, level, rounding="nearest", min_bytes=0)
        others = {n: (p.detach() * 1.5).requires_grad_() for n, p in layer.named_parameters()}
        y = torch.func.functional_call(layer, others, (x.clone().requires_grad_(),))
        found.append(torch.autograd.grad(y.square().sum(), list(others.values())))
    for one, other in zip(*found, strict=True):
        assert F.cosine_similarity(one.flatten(), other.flatten(), 0) >= 0.999


class Follows(nn.Module):
    """Has a layer that follows another while it runs, and takes a difference to it."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(WIDTH, WIDTH)
        self.slow = copy.deepcopy(self.fast).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.lerp_(self.fast.weight + 1, 0.5)
        return (self.fast(x) - self.slow(x)).square()


class FollowsInNewMemory(Follows):
    """The same as it is often written, past the version."""

    def forward(self, x: Tensor) -> Tensor:
        self.slow.weight.data = self.slow.weight.data * 0.5 + self.fast.weight.data
        return (self.fast(x) - self.slow(x)).square()


class Shrinks(Follows):
    """Makes a weight that learns shorter in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.fast.weight.data.mul_(0.5)
        return self.fast(x).square()


class ShrinksInNewMemory(Follows):
    def forward(self, x: Tensor) -> Tensor:
        self.fast.weight.data = self.fast.weight.data * 0.5
        return self.fast(x).square()


@pytest.mark.parametrize("cls", [Follows, FollowsInNewMemory, Shrinks, ShrinksInNewMemory])
def test_a_parameter_that_follows_moves_once_a_step(cls: type[Follows]) -> None:
    plain, again = cls(), cls()
    again.load_state_dict(plain.state_dict())
    x = activation().detach()
    near = []
    for _ in range(2):
        for net in (plain, again):
            net.zero_grad()
        plain(x).sum().backward()
        vramx.checkpoint(again, x, level="keep").sum().backward()
        for one, other in zip(plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)
            assert isinstance(other, nn.Parameter)
        near.append(torch.equal(plain.fast.weight.grad, again.fast.weight.grad))
    # Nothing was copied before the first call; from the second on what was there is read again.
    assert near == [False, True]


def test_that_a_region_writes_into_a_parameter_is_said() -> None:
    errors._said.clear()
    with pytest.warns(VramxWarning, match="weight of Linear, which is no buffer"):
        vramx.checkpoint(Follows(), activation(), level="keep")


def test_attributes_and_what_they_hold_are_put_back_in_place() -> None:
    """As trials of a plan or of a batch leave them."""
    net, shared = nn.Module(), [1, {"two": [2]}]
    net.shared, net.part = shared, nn.Linear(2, 2)
    net.state = types.SimpleNamespace(
        log=deque([shared]), seen={3}, own=numpy.random.default_rng(0)
    )
    net.part.last, net.part.own = torch.zeros(2), torch.Generator().manual_seed(0)
    drawn = net.part.own.get_state().clone()
    before, log = vars(net.part) | {}, net.state.log

    put_back = attributes_as_now(net.modules())
    shared[1]["two"].append(net)
    net.state.log.append(4)
    net.state.seen.add(5)
    net.state = net.part.later = None
    net.part.last.add_(1)
    torch.rand(2, generator=net.part.own)
    put_back()

    assert net.shared is shared
    assert shared == [1, {"two": [2]}]
    assert net.state.log is log
    assert list(log) == [shared]
    assert net.state.seen == {3}
    assert vars(net.part) == before
    assert not net.part.last.any()
    assert torch.equal(net.part.own.get_state(), drawn)


class Frozen(OrderedDict[str, Any]):
    """Refuses to change, as the config of a model of diffusers does."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("frozen")

    update = clear = pop = setdefault = __delitem__ = _refuse


def test_a_container_that_refuses_to_change_is_put_back_in_its_order() -> None:
    net, sizes = nn.Module(), [4, 8]
    net.config = Frozen(sizes=(sizes, 1), scale=(1.0, 2.0), size=3)
    config, held = net.config, list(net.config.values())

    put_back = attributes_as_now(net.modules())
    sizes.append(16)
    config["later"] = 4
    config.move_to_end("sizes")
    put_back()

    assert net.config is config
    assert list(config.items()) == [("sizes", ([4, 8], 1)), ("scale", (1.0, 2.0)), ("size", 3)]
    assert all(now is then for now, then in zip(config.values(), held, strict=True))
    assert held[0][0] is sizes


def test_a_tuple_in_a_container_is_itself_when_it_is_put_back() -> None:
    net = nn.Module()
    net.log = [(1, 2), ([3], (4, [5]))]
    held = list(net.log)
    put_back = attributes_as_now(net.modules())
    net.log[1][1][1].append(6)
    put_back()
    assert net.log == [(1, 2), ([3], (4, [5]))]
    assert all(now is then for now, then in zip(net.log, held, strict=True))


def test_a_lazy_region_is_made_once() -> None:
    def steps(run: Callable[..., Any]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.SiLU(), nn.LazyLinear(8))
        for _ in range(2):
            run(net, torch.ones(4, 8).cumsum(0)).square().sum().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        return *gradients, *net.buffers()

    expected = steps(lambda net, x: net(x))
    found = steps(functools.partial(vramx.checkpoint, level="keep"))
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected) == 9


class EverySecond(Average):
    """Moves its mean in each second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 == 0 else (x - self.mean).square()


def test_a_buffer_that_a_later_call_writes_first_is_told_of_once_and_kept_from_then_on() -> None:
    exact, module = EverySecond(), EverySecond()
    same = []

    def train() -> None:
        for _ in range(6):
            x = torch.randn(8, WIDTH, requires_grad=True)
            one = torch.autograd.grad(exact(x * 1).sum(), x)
            other = torch.autograd.grad(vramx.checkpoint(module, x * 1, level="keep").sum(), x)
            same.append(torch.equal(*one, *other))

    with pytest.warns(VramxWarning, match="mean of EverySecond, which it left alone") as said:
        train()
    assert same == [True, False, True, True, True, True]
    assert len(said) == 1


def test_a_gradient_within_a_region_moves_no_statistics() -> None:
    def gradients(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        x = torch.randn(16, 8, requires_grad=True)

        def forces(x: Tensor) -> Tensor:
            energy = block(x).tanh().sum()
            (found,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy + found.square().sum()

        for _ in range(3):
            call(forces, x).backward()
        assert x.grad is not None
        return [x.grad, *block.buffers()]

    expected = gradients(lambda function, x: function(x))
    found = gradients(lambda function, x: vramx.checkpoint(function, x, level="keep"))
    assert all(map(torch.equal, found, expected))


def test_statistics_of_a_module_of_torch_script_move_once() -> None:
    def trained(*, checkpointed: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
        traced = nn.Sequential(torch.jit.trace(block, torch.randn(4, 8)))
        model = nn.Sequential(nn.Linear(8, 8), traced)
        if checkpointed:
            vramx.checkpoint_modules(model, "1", level="keep")
        for _ in range(3):
            model(torch.randn(16, 8)).square().sum().backward()
        gradients = {f"{name}'": p.grad for name, p in model.named_parameters()}
        return {**dict(model.named_buffers()), **gradients}

    expected, found = trained(checkpointed=False), trained(checkpointed=True)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
