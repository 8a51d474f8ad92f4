"""torch.func and compression: where a transform is active, compression steps aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimize_tools import INT8_NOISE, error
from torch import nn

import vramx
from vramx.compression.hooks import compress

TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,))[1],
    "jacfwd": lambda net, x: torch.func.jacfwd(net)(x),
    "vmap of jvp": lambda net, x: torch.func.vmap(lambda r: torch.func.jvp(net, (r,), (r,))[1])(x),
}
# torch itself refuses to enter these where hooks are, so that they go around a module only.
REVERSE: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda net, x: torch.func.grad(lambda t: net(t).sum())(x),
    "vmap of grad": lambda net, x: torch.func.vmap(torch.func.grad(lambda t: net(t).sum()))(x),
    "jacrev": lambda net, x: torch.func.jacrev(net)(x),
    "hessian": lambda net, x: torch.func.hessian(lambda t: net(t).sum())(x[0]),
}


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


@pytest.mark.parametrize("how", [*TRANSFORMS, *REVERSE])
def test_transforms_of_torch_func_around_a_packed_module_are_exact(how: str) -> None:
    net, x = small_net(), torch.randn(4, 8)
    transform = (TRANSFORMS | REVERSE)[how]
    expected = transform(net, x)
    vramx.compressed_activations(net, min_bytes=0)
    assert torch.equal(transform(net, x), expected)
    assert vramx.compression_stats(net).packed.tensors == 0


@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_of_torch_func_within_a_context_are_exact(how: str) -> None:
    net, x = small_net(), torch.randn(4, 8)

    def weight_gradient() -> torch.Tensor:
        net.zero_grad()
        TRANSFORMS[how](net, x).sum().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    expected = weight_gradient()
    with compress(min_bytes=0) as stats:
        found = weight_gradient()
    assert torch.equal(found, expected)
    assert stats.packed.tensors == 0


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorised_jacobians_within_a_context_are_near(strategy: str) -> None:
    net, x = small_net(), torch.randn(4, 8)
    jacobian = torch.autograd.functional.jacobian
    expected = jacobian(net, x, vectorize=True, strategy=strategy)
    with compress(min_bytes=0):
        found = jacobian(net, x, vectorize=True, strategy=strategy)
    assert error(found, expected) < INT8_NOISE
