"""Inputs of a checkpoint that saturate a function behind layers, where no norm has bounded them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, Packs, cosine, packs, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx.recompute import unbounded

__all__ = ["packs", "quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

Layer = Callable[[Tensor], Tensor]
# What is exact differs by the rounding of a sum alone.
COSINE = 0.9999
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": F.glu,
    "a gate": lambda h: h * h.sigmoid(),
    "a gate of another": lambda h: h[:, ::2] * h[:, 1::2].sigmoid(),
    "tanh": torch.tanh,
    "tanh in place": lambda h: (h * 1).tanh_(),
    "gelu, written out": lambda h: h * (1 + torch.erf(h / 2**0.5)),
    "sine": torch.sin,
    "squeezed": lambda h: h * h.mean(0).sigmoid(),
    "of a sum with a bent one": lambda h: (h + F.gelu(h)).tanh(),
    "of a product": lambda h: (h * F.silu(h)).tanh(),
}
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "rms_norm, written out": lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "of a cast": lambda x: (x.double() * x.double().square().mean(1, True).rsqrt()).float(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "normalize": F.normalize,
    "by a deviation": lambda x: (x - x.mean(1, True)) / (x.std(1, keepdim=True) + 1e-5),
    "by a root": lambda x: (x - x.mean(1, True)) / (x.var(1, keepdim=True) + 1e-5).sqrt(),
    "by a reciprocal": lambda x: x * x.std(1, keepdim=True).clamp(min=1e-6).reciprocal(),
}


def rows() -> Tensor:
    """Return rows of which half are 300 times larger than the others."""
    x = torch.randn(128, WIDTH)
    x[::2] *= 300
    return x


def gradients(layer: nn.Module, region: Layer, x: Tensor, level: object) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = vramx.checkpoint(region, leaf * 1, level=level)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad(y, [leaf, *layer.parameters()], dy))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_large_rows_that_saturate_a_function_behind_a_layer_have_their_gradient(name: str) -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), rows()

    def region(x: Tensor) -> Tensor:
        return FUNCTIONS[name](layer(x)).cumsum(-1)

    for _ in range(2):  # watched, and then by what that showed
        found = gradients(layer, region, x, SMALL)
        exact = gradients(layer, region, x, "keep")
        assert min(cosine([a], [b]) for a, b in zip(found, exact, strict=True)) > COSINE


def test_packed_large_rows_lose_the_slope_of_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that the test above finds: nothing is looked at."""
    monkeypatch.setattr(unbounded.Unbounded, "look_at", lambda *_: None)
    layer, x = nn.Linear(WIDTH, WIDTH), rows()

    def region(x: Tensor) -> Tensor:
        return F.glu(layer(x)).cumsum(-1)

    vramx.manual_seed(0)  # the noise decides how much is lost
    found, exact = gradients(layer, region, x, SMALL), gradients(layer, region, x, "keep")
    assert min(cosine([a], [b]) for a, b in zip(found, exact, strict=True)) < 0.95


@pytest.mark.parametrize("name", NORMS)
def test_an_input_that_a_norm_bounds_is_packed(name: str, packs: Packs) -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def region(x: Tensor) -> Tensor:
        return F.glu(layer(NORMS[name](x))).cumsum(-1)

    gradients(layer, region, torch.randn(128, WIDTH), SMALL)
    assert packs.sizes == [128 * WIDTH]


def test_values_of_an_attention_are_followed_and_scores_are_not(packs: Packs) -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def attended(x: Tensor, value: Tensor) -> Tensor:
        score = layer(x) @ layer(x).t()
        return (score.softmax(-1) @ layer(value)).tanh().cumsum(-1)

    x, value = (torch.randn(128, WIDTH, requires_grad=True) for _ in range(2))
    vramx.checkpoint(attended, x * 1, value * 1, level=SMALL).sum().backward()
    assert packs.sizes == [128 * WIDTH]


def test_a_policy_says_that_a_function_takes_packed_inputs(packs: Packs) -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def region(x: Tensor) -> Tensor:
        return layer(x).tanh().cumsum(-1)

    level = vramx.Compression(min_bytes=0, policy={"tanh": "int8"})
    gradients(layer, region, torch.randn(128, WIDTH), level)
    assert packs.sizes == [128 * WIDTH]
