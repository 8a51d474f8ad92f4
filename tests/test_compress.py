"""compress(): gradients, what is kept by reference, and contexts within contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from compress_tools import (
    Block,
    check_that_nothing_is_left,
    gradient,
    input_of,
    relative_error,
)
from torch import nn

from vramx.compression.codec import codec
from vramx.compression.config import Compression
from vramx.compression.hooks import compress
from vramx.errors import ModifiedInPlaceError
from vramx.recompute.call import checkpoint


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    check_that_nothing_is_left()


# Gradients


def test_the_gradient_of_a_linear_layer_is_within_half_a_step_of_its_input() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(128, 32), input_of(64, 128)
    outward = torch.randn(64, 32)
    with compress(min_bytes=0, rounding="nearest"):
        y = layer(x)
    y.backward(outward, retain_graph=True)
    # Group 128 is a row: the step of codec.py's error bound; the sum below is exact but for
    # float32's own rounding of 64 products, 2**-18 of their size.
    step = x.detach().abs().amax(1, keepdim=True) * 1.0079 / 127
    exact = outward.t() @ x.detach()
    bound = outward.abs().t() @ (step / 2).expand_as(x)
    slack = 2**-18 * (outward.abs().t() @ x.detach().abs())
    assert bool(((layer.weight.grad - exact).abs() <= bound + slack).all())


def test_each_entry_that_draws_noise_renews_it_once_for_captured_graphs(monkeypatch: Any) -> None:
    # What it does under capture is tested on a GPU.
    from vramx.compression.codec import random

    renewed: list[torch.device] = []
    monkeypatch.setattr(random, "renew_on_replay", renewed.append)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
    for rounding in ("stochastic", "nearest", "stochastic"):
        with compress(min_bytes=0, rounding=rounding):
            layers(torch.randn(32, 32, requires_grad=True) * 1.0)
    assert renewed == [torch.device("cpu")] * 2


def test_double_backward_is_close() -> None:
    x = input_of(32, 64)

    def penalty(context: Any) -> torch.Tensor:
        with context:
            y = (x.tanh() * x).sum()
        (inner,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(inner.square().sum(), x)[0]

    exact = penalty(compress(level="keep"))
    assert relative_error(penalty(compress(min_bytes=0)), exact) < 0.05


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_overflow_reaches_the_gradient(bad: float) -> None:
    layer, x = nn.Linear(64, 64), input_of(8, 64)
    with torch.no_grad():
        x[0, 0] = bad
    with compress(min_bytes=0):
        y = layer(x).nan_to_num().sum()
    y.backward()
    assert not bool(layer.weight.grad.isfinite().all())


# What is done to rows of 24 elements, of which groups have parts of several.
OF_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argument of an activation": functional.gelu,
    "result of an activation": torch.tanh,
    "factor": lambda x: x * (x + 1),
    "power": torch.square,
    "norm": lambda x: functional.layer_norm(x, (24,)).exp(),
    "layer": lambda x: (x @ torch.linspace(-1, 1, 24 * 24).view(24, 24)).square(),
}


@pytest.mark.parametrize("way", ["hooks", "checkpoint"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_row_with_nan_stays_alone_and_costs_the_others_no_precision(name: str, way: str) -> None:
    """As what attention gives for tokens that may see none, which nothing reads. A NaN took with it
    the group that it was in, of 128 elements."""
    x = torch.randn(16, 24)
    x[3, 2] = torch.nan

    def gradient(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        run(OF_ROWS[name], leaf * 1).nan_to_num(0).square().sum().backward()
        return leaf.grad

    def packed(function: Callable[..., torch.Tensor], leaf: torch.Tensor) -> torch.Tensor:
        if way == "checkpoint":
            return checkpoint(function, leaf, level=Compression(min_bytes=0))
        with compress(min_bytes=0):
            return function(leaf)

    exact, found = gradient(lambda function, leaf: function(leaf)), gradient(packed)
    assert found.isnan().any(1).nonzero().tolist() == [[3]]
    rows = [row for row in range(16) if row != 3]
    assert relative_error(found[rows], exact[rows]) < 0.05


# Kept by reference


def test_a_change_in_place_of_a_kept_tensor_or_of_a_weight_raises() -> None:
    layer, x = nn.Linear(16, 16), input_of(16, 16)
    with compress(min_bytes=0):
        y = torch.softmax(x, -1)
        z = layer(x).sum()
    y.mul_(2)
    with pytest.raises(ModifiedInPlaceError, match="is at version 1; expected version 0"):
        y.sum().backward()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_a_change_in_place_of_a_packed_tensor_leaves_the_gradient_right() -> None:
    layer, x = nn.Linear(64, 64), input_of(16, 64)
    expected = x.detach().sum(0).expand(64, 64).clone()
    with compress(min_bytes=0):
        y = layer(x).sum()
    with torch.no_grad():
        x.zero_()
    y.backward()
    # Of 16 values each within a step of 3 deviations / 127.
    assert float((layer.weight.grad - expected).abs().max()) < 16 * 4 / 127


def test_operations_in_place_are_right() -> None:
    x = input_of(32, 64)

    def forward(context: Any) -> torch.Tensor:
        with context:
            y = functional.relu(x * 2, inplace=True) * 1.5
            y = functional.dropout(y, 0.0, inplace=True).sigmoid_()
        return torch.autograd.grad(y.sum(), x, retain_graph=True)[0]

    # sigmoid' = y (1 - y) is within a step of y, at most 1 / 127; times 3 from the products.
    exact = forward(compress(level="keep"))
    assert float((forward(compress(min_bytes=0)) - exact).abs().max()) < 3 * 1.01 / 127


# Contexts


def test_nothing_waits_for_the_device(monkeypatch: Any) -> None:
    """Whatever needs a value of a tensor on the host raises; on a device it would block."""
    block, x = Block(dropout=0.1), input_of(4, 16, 64)
    gradient(block, x, compress(min_bytes=0))  # the first use of a device may wait

    def refuse(*args: Any) -> Any:
        raise AssertionError("a value of a tensor was asked for")

    with monkeypatch.context() as patch:
        for name in ("item", "__bool__", "__float__", "__int__", "tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        gradient(block, x, compress(min_bytes=0))
        with pytest.raises(AssertionError, match="was asked for"):
            bool(x.sum() > 0)


@pytest.mark.parametrize("name", ["relu", "square", "tanh", "gelu"])
def test_kernels_are_given_the_tensor_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of what is packed takes as long as a decision about it."""
    given: list[torch.Tensor] = []

    class Launchers:
        def __getattr__(self, what: str) -> Any:
            return lambda tensor, *_, **__: given.append(tensor)

    monkeypatch.setattr(codec, "_launch", lambda device: Launchers())
    x = torch.randn(8, 16, requires_grad=True) * 1
    with compress(min_bytes=0) as stats:
        y = (getattr(torch, name, None) or getattr(functional, name))(x)
    assert stats.packed.tensors == len(given) == 1
    assert given[0].shape == x.shape
    assert given[0].data_ptr() in (x.data_ptr(), y.data_ptr())
