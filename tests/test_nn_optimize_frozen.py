"""vramx.optimize on ResNets whose batch norms are frozen, or in evaluation mode while they train.

Detection and segmentation are trained so. That such blocks compute what they did is tested in
test_nn_optimize_convolutions.py.
"""

from __future__ import annotations

import copy
from typing import Any

import convolution_tools as tools
import pytest
import torch
from convolution_tools import block_of, gradient, image, kept
from norm_tools import held_bytes
from optimize_tools import ROUNDING, error, optimised_copy
from torch import Tensor

import vramx
from vramx.errors import VramxWarning

pytestmark = pytest.mark.usefixtures("seeded")

# In bytes an element of the input, of bfloat16. The result of the last ReLU is counted with the
# next block, whose input it is. Norms in evaluation mode keep their input, frozen ones nothing:
#   bottleneck  input 2, ReLUs' results a quarter each          3/2 packs, 3/2 bits
KEPT = {
    "frozen": (lambda: tools.freeze_batch_norm_2d(tools.resnet.Bottleneck(64, 16)), 3.0),
    "timm": (lambda: tools.freeze_batch_norm_2d(tools.timm_resnet.Bottleneck(64, 16)), 3.0),
    "evaluation": (lambda: tools.in_evaluation(tools.resnet.Bottleneck(64, 16)), 6.0),
}


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_kept_of_a_frozen_norm(name: str) -> None:
    make, plain = KEPT[name]
    block, x = make().bfloat16(), image(2, 64, 16, 16, dtype=torch.bfloat16)
    # Tables of channels are less than a hundredth.
    assert kept(block, x) == pytest.approx(plain, rel=0.02)
    for level, bytes_kept in (("keep", 3.0), ("int8", 1.5 * tools.PACK + 1.5 * tools.BIT)):
        vramx.optimize(block, level)
        assert kept(block, x) == pytest.approx(bytes_kept, rel=0.02)


def test_frozen_convolutions_keep_nothing() -> None:
    block, x = block_of("frozen").requires_grad_(False), image()
    vramx.optimize(block)
    held = held_bytes(lambda: block(x), *block.parameters(), *block.buffers())
    # Of three results, of which the second is an eighth of the input and the others are a half; of
    # each channel of four norms a factor, and of each norm a probe.
    bits = x.numel() * (1 / 2 + 1 / 8 + 1 / 2)
    assert held == bits / 8 + 4 * (32 + 32 + 128 + 128) + 4 * 4
    assert held_bytes(lambda: block(x.detach())) == 0


@pytest.mark.parametrize("name", ["frozen", "evaluation", "detr", "frozen timm"])
@pytest.mark.parametrize("level", ["keep", "int8"])
def test_types_under_autocast_are_the_originals(name: str, level: str) -> None:
    """A frozen norm's products are promoted; torch's norm gives the type that it is given."""
    original, x = block_of(name), image()
    block = optimised_copy(original, level)
    with torch.autocast("cpu", torch.bfloat16):
        (y, found), (expected, exact) = (gradient(each, x) for each in (block, original))
    assert y.dtype == expected.dtype
    step = torch.finfo(torch.bfloat16).eps
    assert error(y, expected) < 4 * step
    assert error(found, exact) < 8 * step + (level == "int8") * tools.INT8_NOISE


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_all"])
def test_mode_and_constants_are_read_at_each_call(level: str) -> None:
    original = block_of("evaluation, learning")
    block = optimised_copy(original, level, min_bytes=1)
    for step, training in enumerate((False, True, False, True)):
        for each in (block, original):
            each.bn2.train(training)
            each.bn3.requires_grad_(training)
            with torch.no_grad():  # loaded
                each.bn1.running_mean.fill_(step)
                each.bn1.running_var.fill_(step + 0.5)
        (y, found), (expected, exact) = (
            gradient(each, image(seed=step)) for each in (block, original)
        )
        assert error(y, expected) < ROUNDING
        assert error(found, exact) < ROUNDING + (level == "int8") * tools.INT8_NOISE
        for ours, theirs in zip(block.buffers(), original.buffers(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6)


class OtherFrozenBatchNorm2d(tools.FrozenBatchNorm2d):
    """Of the name, with another formula."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class EpsilonFrozenBatchNorm2d(tools.FrozenBatchNorm2d):
    """With a number of its own, which a trial with the default does not show."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.epsilon = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.epsilon)


class FixedFrozenBatchNorm2d(tools.FrozenBatchNorm2d):
    """Which does not read its eps."""

    def forward(self, x: Tensor) -> Tensor:
        now, self.eps = self.eps, 1e-5
        y = super().forward(x)
        self.eps = now
        return y


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (OtherFrozenBatchNorm2d, "its result differs"),
        (FixedFrozenBatchNorm2d, "its result differs"),
        (EpsilonFrozenBatchNorm2d, "its bn1 is a EpsilonFrozenBatchNorm2d"),
    ],
)
def test_frozen_norm_that_computes_otherwise_is_left_and_named(norm: Any, reason: str) -> None:
    block = tools.resnet.BasicBlock(64, 64, norm_layer=norm)
    with pytest.warns(VramxWarning, match=reason):
        report = vramx.optimize(block)
    assert report.swapped == ()


def test_frozen_norm_of_a_shortcut_alone_is_called_as_it_is() -> None:
    """A trial has no shortcut, and so does not tell of its norm's class."""
    original = tools.in_evaluation(
        tools.resnet.Bottleneck(64, 32, 2, tools.shortcut(OtherFrozenBatchNorm2d))
    )
    block = copy.deepcopy(original)
    assert len(vramx.optimize(block, "keep", min_bytes=1).swapped) == 1
    (y, found), (expected, exact) = (gradient(each, image()) for each in (block, original))
    assert error(y, expected) < ROUNDING
    assert error(found, exact) < ROUNDING
