"""A pretrained force field (chgnet): its forces are gradients, and a loss of them differentiates.

Forces of an evaluated model are its own. Of the first step of training packed activations may be
far off, and one line says so; from the second on forces are exact, and gradients as good as int8.
Needs the packages chgnet, whose weights are in it, and pymatgen; without them it is skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vramx
from vramx.compression import notices
from vramx.errors import VramxWarning

# Of the gradient of each parameter of a pretrained model.
COSINE = 0.9993

Found = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(scope="module")
def load() -> Callable[[], Any]:
    model = pytest.importorskip("chgnet.model")
    return lambda: model.CHGNet.load(use_device="cpu", verbose=False)


@pytest.fixture(scope="module")
def crystals(load: Callable[[], Any]) -> list[Any]:
    core = pytest.importorskip("pymatgen.core")
    torch.manual_seed(0)
    places = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    places = torch.cat([places, places + 0.5])
    converter, result = load().graph_converter, []
    for _ in range(2):
        moved = (places + 0.03 * torch.randn(8, 3)).tolist()
        cell = core.Structure(core.Lattice.cubic(5.7), ["Na"] * 4 + ["Cl"] * 4, moved)
        result.append(converter(cell))
    return result


def forces_of(net: Any, crystals: list[Any]) -> Tensor:
    return torch.cat(list(net(crystals, task="ef")["f"]))


def step(net: Any, crystals: list[Any], targets: Tensor) -> Found:
    net.train().zero_grad()
    forces = forces_of(net, crystals)
    (forces - targets).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return forces.detach(), gradients


def pack(net: nn.Module) -> None:
    vramx.compressed_activations(net, min_bytes=0)


def recompute(net: nn.Module) -> None:
    vramx.checkpoint_modules(net, where=nn.Linear, level=vramx.Compression(min_bytes=0))


@pytest.mark.parametrize("change", [pack, recompute])
def test_forces_are_exact_or_told_and_gradients_near(
    change: Callable[[Any], None], load: Callable[[], Any], crystals: list[Any]
) -> None:
    notices.forget()
    net = load().eval()
    evaluated = forces_of(net, crystals).detach()
    torch.manual_seed(1)
    targets = evaluated + 0.1 * evaluated.square().mean().sqrt() * torch.randn_like(evaluated)
    exact = step(net, crystals, targets)

    change(net)
    assert torch.equal(forces_of(net.eval(), crystals), evaluated)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, _ = step(net, crystals, targets)
    lines = [str(each.message) for each in told if isinstance(each.message, VramxWarning)]
    assert torch.equal(first, exact[0]) or any("create_graph=True" in line for line in lines)
    forces, gradients = step(net, crystals, targets)
    assert torch.equal(forces, exact[0])
    assert gradients.keys() == exact[1].keys()
    for name, gradient in gradients.items():
        pair = (gradient.flatten().double(), exact[1][name].flatten().double())
        assert torch.cosine_similarity(*pair, dim=0) > COSINE, name

    vramx.restore(net)
    again = step(net, crystals, targets)
    assert torch.equal(again[0], exact[0])
    assert all(torch.equal(again[1][name], each) for name, each in exact[1].items())
