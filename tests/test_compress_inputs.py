"""The batch is kept as it is: the program holds it anyway, and its columns may differ in scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compress_tools import held_bytes, input_of
from policy_tools import saved_reason
from torch import nn

import vramx
from vramx.compression.hooks import compress


def columns() -> torch.Tensor:
    """Return columns from a rate to an income, six orders of magnitude apart."""
    torch.manual_seed(1)
    return torch.randn(512, 64) * torch.logspace(-1, 5, 64) + torch.logspace(0, 5, 64)


def first_gradient(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    net(x).square().mean().backward()
    gradient = net[0].weight.grad
    return gradient.clone()


FIRST: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(64),
    "linear": lambda: nn.Linear(64, 64),
}


@pytest.mark.parametrize("first", FIRST)
def test_columns_of_different_scale_keep_their_gradient(first: str) -> None:
    net = nn.Sequential(FIRST[first](), nn.Linear(64, 16))
    x = columns()
    # Of what comes after, nothing is an argument of the first layer's own gradient.
    exact = first_gradient(net, x)
    vramx.compressed_activations(net, min_bytes=0)
    assert torch.equal(first_gradient(net, x), exact)
    assert vramx.compression_stats(net).kept["input"].tensors == 1


def test_packed_it_would_be_far_off() -> None:
    net, x = nn.Sequential(nn.Linear(64, 1)), columns()
    x[::2] *= -1.0  # means cancel
    exact = first_gradient(net, x)
    vramx.compressed_activations(net, min_bytes=0)
    assert torch.equal(first_gradient(net, x), exact)
    found = first_gradient(net, x.clone().requires_grad_() * 1.0)
    assert not torch.allclose(found, exact, rtol=0.01, atol=0.0)


@pytest.mark.parametrize("view", ["itself", "flatten", "unsqueeze", "slice"])
def test_the_batch_and_its_views_take_no_memory(view: str) -> None:
    layer, x = nn.Linear(256, 8), torch.randn(16, 16, 256)
    views: dict[str, Callable[[], torch.Tensor]] = {
        "itself": lambda: x,
        "flatten": lambda: x.flatten(0, 1),
        "unsqueeze": lambda: x[None],
        "slice": lambda: x[1:],
    }

    def forward() -> torch.Tensor:
        with compress(min_bytes=0):
            return layer(views[view]()).sum()

    forward()
    taken, y = held_bytes(forward)
    assert taken < 0.01 * x.numel() * 4
    del y


def test_what_the_pass_computes_without_a_gradient_is_packed() -> None:
    """Nobody else holds what a frozen layer returns, or a batch's cast."""
    frozen, layer = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    x = torch.randn(8, 64)
    assert saved_reason(lambda: layer(frozen(x))) == {"packed": 1}
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_reason(lambda: layer(x)).get("packed") == 1


@pytest.mark.parametrize("times", [torch.mul, lambda x, y: torch.addcmul(x, x, y)])
def test_a_factor_that_the_pass_computes_without_a_gradient_is_exact(times: Any) -> None:
    """A program makes it as far from even as it likes."""
    factor = torch.rand(64, 64).index_fill(1, torch.arange(0, 64, 8), 1e10)
    x = input_of(64, 64)
    with compress(min_bytes=0):
        y = times(x * 1.0, factor * 1.0)
    expected = torch.autograd.grad(times(x * 1.0, factor * 1.0).sum(), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected[0])


def test_a_change_of_the_batch_before_backward_is_an_error_as_in_torch() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    with compress(min_bytes=0):
        y = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()
