"""Batch, group and instance norm and their convolutions on a GPU: kernels, sums, bytes, blocks.

The same kernels are compared with plain torch to the bit in an interpreter; here is what only a
GPU shows: fused products, torch's reductions, many programs, and the memory that is held.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as functional
from channel_norm_tools import ACTIVATIONS, ours, torchs
from norm_tools import EXACT, INT8, held_bytes
from torch import Tensor

import vramx
from vramx.compression.codec.codec import bytes_of
from vramx.compression.config import MASK_FORMAT
from vramx.nn.functional import batch_norm, conv2d

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

# Channels within a group of the codec, groups within channels, neither; runs of a channel that are
# longer than a tile, shorter, and of an odd length; a channel of which too few are for a kernel.
SHAPES = [(16, 64, 57, 31), (8, 256, 28, 28), (4, 72, 29, 29), (8, 512, 7, 7), (3, 3, 7, 7)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
every_order = pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
WORDS = ("none", "relu", "leaky_relu", "silu", "gelu")
# The errors of three numbers are one 12 times the other by chance in one of a thousand pairs, by
# F(3, 3); those of many numbers are not.
FEW, CHANCE_OF_FEW = 16, 12
# Half a step of int8, of a group whose largest magnitude is at most 5 deviations.
NOISE = 5 / 127 / 2


def sample(seed: int, *shape: int, last: bool = False) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda").bfloat16()
    x = x.to(memory_format=torch.channels_last) if last else x
    return x.requires_grad_()


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.double(), exact.double()
    return float((found - exact).norm() / (exact.norm() + 1e-30))


@every_order
@every_shape
@pytest.mark.parametrize("kind", ["batch", "group", "instance"])
def test_results_and_gradients_are_as_good_as_torchs(
    kind: str, shape: tuple[int, ...], last: bool
) -> None:
    """Against float64: within twice the error of torch's own bfloat16, and of int8 its noise.

    Ours behind an activation against torch's norm and activation, of one convolution's input.
    """
    x, weight, bias = sample(0, *shape, last=last), sample(1, shape[1]), sample(2, shape[1])
    kernel = sample(3, 16, shape[1], 3, 3)
    leaves = [x, weight, bias, kernel]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for word in WORDS:

        def plain(x: Tensor, weight: Tensor, bias: Tensor, kernel: Tensor) -> list[Tensor]:
            y = ACTIVATIONS[word](torchs(kind, x, (weight, bias)))  # noqa: B023 - called in its turn
            y = functional.conv2d(y, kernel, padding=1)
            dy = torch.sin(torch.arange(y.numel(), device="cuda") * 12.9898)
            dy = dy.view(y.shape).to(y.dtype)
            return [y, *torch.autograd.grad(y, [x, weight, bias, kernel], dy)]

        exact, theirs = plain(*wide), plain(*leaves)
        for keep, noise in ((EXACT, 0.0), (INT8, NOISE)):
            normed = ours(kind, x, (weight, bias), activation=word, keep=keep)
            y = conv2d(normed, kernel, padding=1, keep=keep)
            dy = torch.sin(torch.arange(y.numel(), device="cuda") * 12.9898)
            dy = dy.view(y.shape).to(y.dtype)
            found = [y, *torch.autograd.grad(y, leaves, dy)]
            for i, each in enumerate(found):
                chance = 2 if each.numel() >= FEW else CHANCE_OF_FEW
                bound = chance * error(theirs[i], exact[i]) + (noise if i else 0) + 2**-10
                assert error(each, exact[i]) < bound, (word, keep.packs, i)


@every_order
@every_shape
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
def test_norm_by_constants_is_as_good_as_torchs(
    shape: tuple[int, ...], last: bool, adds: bool
) -> None:
    """Against float64, and a bit an element is kept: no pack is part of any gradient."""
    x, residual = sample(0, *shape, last=last), sample(1, *shape, last=last)
    mean, bias, weight, var = (sample(seed, shape[1]).float().detach() for seed in range(2, 6))
    var, leaves = var.square() + 0.1, [x, bias.requires_grad_(), residual][: 2 + adds]

    def plain(x: Tensor, bias: Tensor, *added: Tensor) -> Tensor:
        every = (each.to(bias.dtype) for each in (mean, var, weight))
        y = functional.batch_norm(x, *every, bias)
        return torch.relu(sum(added, y))

    def fused(x: Tensor, bias: Tensor, *added: Tensor) -> Tensor:
        residual = added[0] if added else None
        return batch_norm(x, mean, var, weight, bias, activation="relu", residual=residual).y

    def run(function: object, leaves: list[Tensor]) -> list[Tensor]:
        y = function(*leaves)  # type: ignore[operator]
        dy = torch.sin(torch.arange(y.numel(), device="cuda") * 12.9898).view(y.shape)
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    exact = run(plain, [leaf.detach().double().requires_grad_() for leaf in leaves])
    for ours_, theirs, right in zip(run(fused, leaves), run(plain, leaves), exact, strict=True):
        chance = 2 if right.numel() >= FEW else CHANCE_OF_FEW
        assert error(ours_, right) < chance * error(theirs, right) + 2**-10
    held = held_bytes(lambda: fused(*leaves), *leaves, weight)
    # A factor a channel, and a probe of one element.
    assert held == bytes_of(x.numel(), MASK_FORMAT) + 4 * shape[1] + 2


@every_order
@every_shape
def test_statistics_that_run_are_torchs(shape: tuple[int, ...], last: bool) -> None:
    """Sums of at least 147 numbers of order 1 in float32, in another order."""
    x = sample(0, *shape, last=last)
    norms = [torch.nn.BatchNorm2d(shape[1]).cuda(), vramx.nn.BatchNorm2d(shape[1]).cuda()]
    for norm in norms:
        norm(x)
    for theirs, found in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
        assert torch.allclose(found.double(), theirs.double(), rtol=1e-5, atol=1e-6)


def test_residual_is_added_before_relu() -> None:
    shape = (8, 256, 14, 14)
    x, residual = sample(0, *shape, last=True), sample(1, *shape, last=True)
    y = batch_norm(x, None, None, training=True, activation="relu", residual=residual).y
    exact = functional.batch_norm(x.double(), None, None, training=True) + residual.double()
    assert torch.allclose(y.double(), exact.relu(), rtol=2**-7, atol=2**-8)
    (gradient,) = torch.autograd.grad(y, residual, torch.ones_like(y))
    assert torch.equal(gradient, (y > 0).to(y.dtype))


@every_order
def test_bytes_that_are_held_are_the_packs(last: bool) -> None:
    x, kernel = sample(0, 16, 64, 56, 56, last=last), sample(1, 64, 64, 3, 3)
    norm = vramx.nn.BatchNorm2d(64).cuda()
    norm.activation = "relu"

    def run() -> Tensor:
        return conv2d(norm.normed(x), kernel, padding=1)

    held = held_bytes(run, x, kernel, *norm.parameters(), *norm.buffers()) / x.numel()
    assert held == pytest.approx(1 + 6 / 128 + 1 / 8, rel=0.01)


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_all"])
def test_resnet_learns_as_its_original(level: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    original = torchvision.models.resnet50(num_classes=10).cuda()
    original = original.to(memory_format=torch.channels_last).train()
    model, wide = copy.deepcopy(original), copy.deepcopy(original).double()
    assert len(vramx.optimize(model, level).swapped) == 16
    x = sample(0, 8, 3, 96, 96, last=True).detach().float()

    def gradient(model: torch.nn.Module, x: Tensor, half: bool) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            y = model(x)
        loss = functional.cross_entropy(y.double(), torch.arange(8, device="cuda"))
        found = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([each.double().flatten() for each in found])

    exact = gradient(wide, x.double(), False)
    theirs, found = gradient(original, x, True), gradient(model, x, True)
    # Of 8 images' noise in bfloat16 through 50 layers; int8's is less than its own.
    assert error(found, exact) < 1.5 * error(theirs, exact) + 0.02
    for name, buffer in model.named_buffers():
        expected = wide.get_buffer(name)
        bound = 2 * error(original.get_buffer(name), expected) + 2**-10
        assert error(buffer, expected) <= bound, name
