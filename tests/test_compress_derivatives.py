"""Gradients of gradients: told once, and exact from the next forward on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from compress_tools import input_of
from torch import nn

import vramx
from vramx import errors
from vramx.compression.derivatives import Unpacking
from vramx.errors import VramxWarning


class Energy(nn.Module):
    """A sum over pairs of exponentials of squared distances, as force fields have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        distances = (positions[:, None] - positions[None]).square().sum(-1)
        waves = torch.exp(-((distances[..., None] - torch.linspace(0, 4, 16)) ** 2))
        return self.second(nn.functional.softplus(self.first(waves))).sum()


def forces_and_gradient(net: nn.Module, atoms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the forces, and the gradient of a loss of them."""
    net.zero_grad()
    positions = atoms.detach().requires_grad_()
    (forces,) = torch.autograd.grad(net(positions), positions, create_graph=True)
    forces.square().sum().backward()
    found = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    return forces.detach(), torch.cat(found)


@pytest.fixture(scope="module", autouse=True)
def _precise_exponentials() -> None:
    """torch's first exponential of a process is off by 1e-4 at times, where two threads share it
    (2.13 on a CPU, one process of five)."""
    torch.rand(1 << 14).exp()


@pytest.fixture(autouse=True)
def _told_nothing() -> None:
    errors._said.clear()


def test_the_step_after_the_first_is_exact_and_still_packs(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    net, atoms = Energy(), torch.rand(24, 3) * 2
    other = copy.deepcopy(net)
    forces, gradient = forces_and_gradient(net, atoms)
    vramx.compressed_activations(net, min_bytes=0)
    with pytest.warns(VramxWarning, match=r"Energy.*level='keep'"):
        first, _ = forces_and_gradient(net, atoms)
    assert not torch.equal(first, forces)
    stats = vramx.compression_stats(net)
    stats.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, found_gradient = forces_and_gradient(net, atoms)
    assert torch.equal(found, forces)
    assert torch.allclose(found_gradient, gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max())
    assert stats.packed.tensors == 1  # of the second layer; exp holds the data of the first
    assert stats.kept["derivative"].tensors > 3
    # Without the notice the second step would be off.
    monkeypatch.setattr(Unpacking, "_note", lambda *_: None)
    vramx.compressed_activations(other, min_bytes=0)
    forces_and_gradient(other, atoms)
    assert not torch.equal(forces_and_gradient(other, atoms)[0], forces)


def test_a_penalty_through_a_context_is_told_and_a_plain_backward_changes_nothing() -> None:
    layer, x = nn.Linear(64, 64), input_of(8, 64)
    context = vramx.compress(min_bytes=0)

    def packed() -> tuple[int, torch.Tensor]:
        context.stats.reset()
        with context:
            y = layer(x).tanh().sum()
        assert "tanh" in context.stats.operations
        return context.stats.packed.tensors, y

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            count, y = packed()
            torch.autograd.grad(y, x, retain_graph=True)
            assert count == 2
    with pytest.warns(VramxWarning, match="create_graph=True"):
        torch.autograd.grad(y, x, create_graph=True)
    assert packed()[0] == 1


def test_a_way_that_keeps_everything_tells_of_the_way_that_packs() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(8, 64, requires_grad=True)
    context = vramx.compress(min_bytes=0)
    slopes = []
    for way in (torch.sin, torch.tanh):
        with context:
            y = way(way(layer(x))).sum()
        slopes.append(torch.autograd.grad(y, x, create_graph=True)[0])
    exact = torch.autograd.grad(layer(x).tanh().tanh().sum(), x)[0]
    assert torch.equal(slopes[1], exact)


class _Recomputes(torch.autograd.Function):
    """Its backward runs its forward again, under grad mode from the start."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, grad)[0]


def test_a_function_that_recomputes_is_no_derivative_of_a_gradient() -> None:
    x, context = input_of(8, 64), vramx.compress(min_bytes=0)
    with context:
        y = _Recomputes.apply(x.tanh())
    y.sum().backward()
    context.stats.reset()
    with context:
        x.tanh()
    assert context.stats.packed.tensors == 1
