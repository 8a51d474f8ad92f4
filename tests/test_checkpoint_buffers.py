"""A recomputation leaves modules and generators as one forward pass does, and has its gradient."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from checkpoint_tools import LEVELS, SMALL, WIDTH, activation, check_near, quiet, seeds
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from uncollected import nothing_waits_for_the_collector

import vramx
from vramx.compression import enclosing
from vramx.compression.config import Compression
from vramx.errors import VramxWarning
from vramx.recompute import buffers, noted

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")


class Average(nn.Module):
    """Takes off a running mean, which it moves in one of the ways that models do."""

    mean: Tensor

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if self.how == "in a new tensor":
            self.mean = self.mean * 0.5 + now * 0.5
        elif self.how == "past the version":  # as averages of codebooks are often written
            self.mean.data.lerp_(now, 0.5)
        elif self.how == "in new memory":
            self.mean.data = self.mean.data * 0.5 + now * 0.5
        elif self.training:
            self.mean.lerp_(now, 0.5)
        return (x - self.mean).square()


class Learnt(nn.Module):
    """Writes into a parameter that learns, in one of the ways that codebooks do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.code = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = (x - self.code.detach()).square()
        now = x.detach().mean(0)
        if self.how == "past the version":
            self.code.data.lerp_(now, 0.5)
        else:
            with torch.no_grad():
                if self.how == "in a list":
                    torch._foreach_mul_([self.code], 0.5)
                else:
                    self.code[::2] += now[::2]
        return before * (x - self.code.detach()).square() * self.code


@LEVELS
@pytest.mark.parametrize("how", ["past the version", "in a list", "in a view"])
def test_a_parameter_that_a_region_writes_into_is_what_it_was_from_the_first_call_on(
    how: str, level: Any
) -> None:
    found = []
    for run in (functools.partial(vramx.checkpoint, level=level), lambda module, x: module(x)):
        torch.manual_seed(0)
        module = Learnt(how)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                x = activation()
                run(module, x).sum().backward()
        found.append((module.code.detach(), module.code.grad))
    (code, gradient), (exact_code, exact_gradient) = found
    torch.testing.assert_close(code, exact_code)
    if level == "keep":
        torch.testing.assert_close(gradient, exact_gradient)
    assert nn.functional.cosine_similarity(gradient, exact_gradient, 0) > 0.999


class Viewed(Average):
    """Has a view of a buffer that it moves, as another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("even", self.mean[::2])

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return (x[:, ::2] - self.even).repeat(1, 2).square()


class MadeLate(nn.Module):
    """Makes a buffer, a parameter and a part in its first call, and takes the buffer off again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

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
        self.note, self.calls, self.last = note, 0, torch.zeros(WIDTH)
        self.lasts = [torch.zeros(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.note == "counter":
            self.calls += 1
        elif self.note == "tensor":
            self.last = mean
        elif self.note == "tensor in place" and self.last.any():
            self.last.mul_(0.5).add_(mean)
        elif self.note == "tensor in place":
            self.last = mean + 1
        elif self.note == "tensor past the version":
            self.last.data.mul_(0.5).add_(mean)
        elif self.note == "tensor in a list":
            self.lasts[0].mul_(0.5).add_(mean)
            x = x * self.lasts[0]
        elif self.note == "what was not there":
            x = x * getattr(self, "later", 1.0)
            self.later = 2.0
        return (x - self.last).square() * (1 + self.calls)


class Drawing(nn.Module):
    """Scales by numbers that torch does not draw."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.source.random()
        return (x * drawn).square() if drawn < 0.5 else (x * drawn).sin()


class Normalised(nn.Module):
    """Calls the kernel of a batch norm with statistics of its own, as many libraries do."""

    mean: Tensor
    variance: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        for name, start in (("mean", torch.zeros(WIDTH)), ("variance", torch.ones(WIDTH))):
            if how == "parameters":
                self.register_parameter(name, nn.Parameter(start, requires_grad=False))
            else:
                self.register_buffer(name, start)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training).square()


class Scaled(nn.Module):
    """Scales by the statistics of its norm before these move, as convolutions of QAT do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm.running_var is not None
        scale = self.norm.running_var.sqrt()
        return self.norm(x * scale).square() / scale


AVERAGES = ("in place", "in a new tensor", "past the version", "in new memory")
NOTES = ("counter", "tensor", "tensor in place", "tensor past the version", "what was not there")
MOVING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm with a plain average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, -1)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "statistics in buffers of another": lambda: Normalised("buffers"),
    "statistics in parameters of another": lambda: Normalised("parameters"),
    "statistics that something else reads": Scaled,
    "power iteration": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "a view of an average": Viewed,
    "what is made late": MadeLate,
    "quantisation": observed,
    **{f"average {how}": functools.partial(Average, how) for how in AVERAGES},
    **{note: functools.partial(Noting, note) for note in NOTES},
    "numbers of numpy": lambda: Drawing(numpy.random),
    "numbers of Python": lambda: Drawing(random),
}


@pytest.mark.parametrize("how", AVERAGES)
def test_calls_of_new_lengths_leave_no_copies_to_the_collector(how: str) -> None:
    """Each of them is watched."""

    def train(*lengths: int) -> None:
        module = Average(how)
        for length in lengths:
            vramx.checkpoint(module, activation(length, WIDTH), level=SMALL).sum().backward()

    train(6, 7)
    with nothing_waits_for_the_collector():
        train(8, 9)


@pytest.mark.parametrize("name", MOVING)
@LEVELS
@pytest.mark.parametrize("way", ["modules", "function", "lambda"])
def test_what_moves_moves_once_a_step(name: str, level: str | Compression, way: str) -> None:
    ours, model = (
        nn.Sequential(MOVING[name](), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
    )
    model.load_state_dict(ours.state_dict())
    run: Callable[[Tensor], Tensor] = ours
    if way == "modules":
        vramx.checkpoint_modules(ours, where=nn.Sequential, level=level)
    else:
        call = ours if way == "function" else lambda x: ours(x * 1.0)
        run = functools.partial(vramx.checkpoint, call, level=level)
    for step in range(3):
        pair, drawn = [], []
        for function in (model, run):
            for seed in (torch.manual_seed, random.seed, numpy.random.seed):
                seed(step)
            leaf = torch.randn(16, WIDTH, requires_grad=True)
            function(leaf * 1.0).square().sum().backward()
            pair.append(leaf.grad)
            drawn.append((random.random(), numpy.random.random()))
        assert drawn[0] == drawn[1]
        assert vars(ours[0]).get("calls") == vars(model[0]).get("calls")
        moved = ours.state_dict().items()
        for (key, found), expected in zip(moved, model.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{key} at {step}")
        check_near(pair[1:], pair[:1], level)


def test_a_tensor_in_a_list_that_a_region_writes_into_is_told_of() -> None:
    """There are no copies of such tensors."""
    module = Noting("tensor in a list")
    with pytest.warns(VramxWarning, match="a tensor that lasts of Noting holds"):
        vramx.checkpoint(module, activation(6, WIDTH), level="keep").sum().backward()


def test_a_buffer_that_a_list_holds_too_is_not_told_of() -> None:
    module = Average()
    module.means = [module.mean]  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error", VramxWarning)
        vramx.checkpoint(module, activation(6, WIDTH), level="keep").sum().backward()


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


NORM = nn.BatchNorm1d(WIDTH)


class Trainer:
    """Is no module, and has some."""

    def __init__(self) -> None:
        self.norms = {"own": [NORM]}["own"]

    def __call__(self, x: Tensor) -> Tensor:
        return self.norms[0](x).sin()

    def within(self) -> Callable[[Tensor], Tensor]:
        return lambda x: self(x * 1)


TRAINER, NORMS, TABLE = Trainer(), [NORM], {"norm": NORM}


def by_name(x: Tensor) -> Tensor:
    return TRAINER.norms[0](x).sin() if x.dim() == 2 else by_name(x[0])


def of_a_dictionary() -> Callable[[Tensor], Tensor]:
    table = {"norm": NORM}
    return lambda x: table["norm"](x).sin()


REACHING: dict[str, Callable[[Tensor], Tensor]] = {
    "named": lambda x: NORM(x).sin(),
    "in a region within": lambda x: vramx.checkpoint(NORM, x.sin(), level=SMALL).sin(),
    "in a dictionary": of_a_dictionary(),
    "of an object that is called": Trainer(),
    "of a method": Trainer().__call__,
    "closed over": Trainer().within(),
    "of an object that is named": lambda x: TRAINER(x * 1),
    "in a list that is named": lambda x: NORMS[0](x).sin(),
    "in a dictionary that is named": lambda x: TABLE["norm"](x).sin(),
    "by a function that is named": lambda x: by_name(x * 1),
}


@pytest.mark.parametrize("name", REACHING)
def test_buffers_of_a_module_that_a_function_reaches_move_once(name: str) -> None:
    NORM.reset_running_stats()
    vramx.checkpoint(REACHING[name], activation(), level=SMALL).sum().backward()
    assert NORM.num_batches_tracked == 1


class EverySecond(Average):
    """Moves its mean in each second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 == 0 else (x - self.mean).square()


def test_a_buffer_that_a_later_call_writes_first_is_told_of_once_and_kept_from_then_on() -> None:
    exact, module = EverySecond(), EverySecond()

    def is_same() -> bool:
        x = torch.randn(8, WIDTH, requires_grad=True)
        one = torch.autograd.grad(exact(x * 1).sum(), x)
        other = torch.autograd.grad(vramx.checkpoint(module, x * 1, level="keep").sum(), x)
        return torch.equal(*one, *other)

    with pytest.warns(VramxWarning, match="mean of EverySecond, which it left alone") as said:
        same = [is_same() for _ in range(6)]
    assert same == [True, False, True, True, True, True]
    assert len(said) == 1


class Hooked(nn.Linear):
    """Has a part that a hook calls, as layers of quantisation-aware training do."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.part = part
        self.register_forward_hook(lambda module, _, y: module.part(y))


class OfHalves(nn.Module):
    """Has methods that run one part each."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDTH, WIDTH), part

    def encode(self, x: Tensor) -> Tensor:
        return torch.sin(self.first(x))

    def decode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.part(x))


def _steps_of_two_regions(model: nn.Module, level: str | None) -> list[list[Tensor]]:
    torch.manual_seed(0)
    found, regions = [], level is not None
    if regions and isinstance(model, Hooked):
        vramx.checkpoint_modules(model, lambda m: m in (model, model.part), level=level)
    for _ in range(3):
        x = activation()
        if isinstance(model, OfHalves) and regions:
            x = vramx.checkpoint(model.encode, x, level=level)
            y = vramx.checkpoint(model.decode, x, level=level)
        else:
            y = model.decode(model.encode(x)) if isinstance(model, OfHalves) else model(x)
        model.zero_grad()
        y.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([*gradients, *(buffer.clone() for buffer in model.buffers())])
    return found


def in_an_attribute(how: str) -> nn.Module:
    part = Average(how)
    mean = part._buffers.pop("mean")
    part.mean = mean
    return part


PARTS: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Average("in place"),
    "past the version": lambda: Average("past the version"),
    "observed": observed,
    "in an attribute": lambda: in_an_attribute("in place"),
    "in an attribute, past the version": lambda: in_an_attribute("past the version"),
}


@pytest.mark.parametrize("model", [Hooked, OfHalves])
@pytest.mark.parametrize("how", PARTS)
def test_a_part_that_another_region_runs_moves_once(model: Callable[..., Any], how: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return model(PARTS[how]())

    expected = _steps_of_two_regions(made(), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", VramxWarning)
        torch.testing.assert_close(_steps_of_two_regions(made(), "keep"), expected)


def test_functions_that_are_compiled_in_each_step_leave_nothing() -> None:
    module = Average()
    for _ in range(2 * noted.MOST_REGIONS):
        names: dict[str, Any] = {"module": module}
        exec("def region(x): return module(x)", names)
        vramx.checkpoint(names["region"], activation(), level="keep").sum().backward()
    written = buffers._written.beside(module)[module][True]
    assert len(written.regions) <= noted.MOST_REGIONS


@pytest.mark.skipif(not enclosing.is_told(), reason="torch's own checkpoint fails in TorchScript")
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


class Membrane(nn.Module):
    """Hands its potential on from step to step, as spiking neurons do, and with it the gradient."""

    def __init__(self, as_buffer: bool, in_place: bool) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.9))
        self.in_place = in_place
        if as_buffer:
            self.register_buffer("potential", torch.zeros(()), persistent=False)

    def reset(self) -> None:
        self.potential = torch.zeros(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.potential *= self.decay
            self.potential += x
        else:
            self.potential = self.potential * self.decay + x
        return torch.tanh(self.potential)


@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_that_is_handed_on_with_its_graph_has_the_same_gradients(
    as_buffer: bool, in_place: bool
) -> None:
    def gradients(*, checkpointed: bool) -> list[Tensor]:
        module = Membrane(as_buffer, in_place)
        if checkpointed:
            vramx.checkpoint_modules(module, Membrane, level="keep")
        x = torch.linspace(-1, 1, 12 * WIDTH).view(3, 4, WIDTH).requires_grad_()
        for _ in range(2):
            module.reset()
            torch.stack([module(part * 1) for part in x]).square().sum().backward()
        return [x.grad, module.decay.grad, module.potential.detach()]  # type: ignore[list-item]

    expected, found = (gradients(checkpointed=checkpointed) for checkpointed in (False, True))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
