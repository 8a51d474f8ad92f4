"""A recomputation leaves the buffers of modules as one forward pass does, and has its gradient."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, activation, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx import errors
from vramx.compression.config import Compression
from vramx.errors import VramxWarning

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


MOVING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm with a plain average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, -1)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "power iteration": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "average": Average,
    "average in a new tensor": Counter,
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("level", [SMALL, "keep"], ids=["int8", "exact"])
@pytest.mark.parametrize("way", ["modules", "function", "lambda"])
def test_buffers_move_once_a_step(name: str, level: str | Compression, way: str) -> None:
    ours = nn.Sequential(MOVING[name](), nn.Linear(WIDTH, WIDTH), nn.GELU())
    plain = copy.deepcopy(ours)
    run: Callable[[Tensor], Tensor] = ours
    if way == "modules":
        vramx.checkpoint_modules(ours, where=nn.Sequential, level=level)
    else:
        call = ours if way == "function" else lambda x: ours(x * 1.0)
        run = functools.partial(vramx.checkpoint, call, level=level)
    for step in range(3):
        pair = []
        for model, function in ((plain, plain), (ours, run)):
            torch.manual_seed(step)
            leaf = torch.randn(16, WIDTH, requires_grad=True)
            model.zero_grad()
            function(leaf * 1.0).square().sum().backward()
            pair.append(leaf.grad)
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


def test_a_parameter_that_follows_moves_once_a_step() -> None:
    plain, again = Follows(), Follows()
    again.load_state_dict(plain.state_dict())
    x = activation().detach()
    near = []
    for _ in range(2):
        for net in (plain, again):
            net.zero_grad()
        plain(x).sum().backward()
        vramx.checkpoint(again, x, level="keep").sum().backward()
        assert torch.equal(plain.slow.weight, again.slow.weight)
        assert isinstance(again.slow.weight, nn.Parameter)
        near.append(torch.equal(plain.fast.weight.grad, again.fast.weight.grad))
    # Nothing was copied before the first call; from the second on what was there is read again.
    assert near == [False, True]


def test_that_a_region_writes_into_a_parameter_is_said() -> None:
    errors._said.clear()
    with pytest.warns(VramxWarning, match="weight of Linear, which is no buffer"):
        vramx.checkpoint(Follows(), activation(), level="keep")
