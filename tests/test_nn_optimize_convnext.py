"""ConvNeXt's blocks under vramx.optimize: few operators, and packs alone under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norm_tools import held_bytes
from optimize_tools import optimised_copy
from test_nn_operators import Watch
from test_nn_optimize_convolutions import APART, PACK, block_of, image
from torch import Tensor

import vramx

pytestmark = pytest.mark.usefixtures("seeded")


CONVNEXTS = pytest.mark.parametrize("name", ["torchvision convnext", "timm convnext"])


@CONVNEXTS
def test_a_convnext_block_is_few_operators(name: str) -> None:
    """Each more takes the host time that a step of small layers is made of."""
    block, x = block_of(name), image(2, 64, 8, 8)
    vramx.optimize(block, group_size=64)
    with Watch() as forward, torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    with Watch() as backward:
        y.sum().backward()
    named = [
        [each.split("::")[1] for each in watch.seen if each.startswith("vramx::")]
        for watch in (forward, backward)
    ]
    assert named[0] == ["keep", "convolution", "norm", "two_linears"]
    assert named[1] == ["two_linears_backward", "norm_backward"]
    # Of torch's own: the input's cast, the addition and views; the scale's view in torchvision.
    work = [each for each in forward.seen if each in ("aten::_to_copy", "aten::add.Tensor")]
    assert sorted(work) == ["aten::_to_copy", "aten::add.Tensor"]
    assert len(forward.seen) <= 11


@CONVNEXTS
def test_under_autocast_a_convnext_block_keeps_packs_alone(name: str) -> None:
    """Torch's norm, which has weights in float32, would keep its input there."""
    block, x = block_of(name), image(2, 64, 16, 16)
    vramx.optimize(block)

    def call() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [block(x)]

    held = held_bytes(call, x, *block.parameters()) / x.numel()
    assert held == pytest.approx(6 * PACK + APART, rel=0.02)


@CONVNEXTS
def test_under_autocast_a_convnext_block_is_the_original(name: str) -> None:
    original, x = block_of(name), image(2, 64, 8, 8)
    block = optimised_copy(original)

    def run(module: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        return [y, *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])]

    # Some ten roundings of bfloat16 in a row, independent, and in gradients int8's 1 %.
    bounds = [torch.finfo(torch.bfloat16).eps * 10**0.5, *[0.03] * 100]
    for ours, theirs, bound in zip(run(block), run(original), bounds, strict=False):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= bound * theirs.norm()
