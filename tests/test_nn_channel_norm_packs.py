"""What batch, group and instance norm and convolutions keep, and what gradients come of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from channel_norm_tools import affine_of, every_order, image, ours, torchs
from norm_tools import INT4, INT8, NEAREST, step_of
from torch import Tensor

from vramx.compression.codec import random
from vramx.compression.codec.codec import pack
from vramx.compression.config import Compression
from vramx.nn import reference_channel_norm as reference
from vramx.nn.functional import batch_norm
from vramx.nn.keeping import decode

pytestmark = pytest.mark.usefixtures("seeded")


WIDE = (4, 64, 4, 4)


def bounds(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far the gradients of x and of weight may be, of one batch norm and a mask of dy.

    With d <= step the error of n: dweight = sum dy n is off by sum |dy| d; and dx, where it has
    n mean(g n), by r (d |mean(g n)| + (|n| + d) mean(|g| d)).
    """
    n, rstd = reference.normalise(x.detach().double(), reference.Shape(0, x.shape), 1e-5)
    last = x.is_contiguous(memory_format=torch.channels_last)
    d = step_of(n.movedim(1, -1)).movedim(-1, 1) if last else step_of(n)
    g, r = dy.double() * weight.detach().double().view(1, -1, 1, 1), rstd.view(1, -1, 1, 1)

    def mean(value: Tensor) -> Tensor:
        return value.mean((0, 2, 3), keepdim=True)

    off = d * mean(g * n).abs() + (n.abs() + d) * mean(g.abs() * d)
    return off * r, (dy.abs().double() * d).sum((0, 2, 3))


@every_order
@pytest.mark.parametrize("keep", [INT8, NEAREST, INT4], ids=["stochastic", "nearest", "4 bits"])
def test_int8_gradients_are_within_a_step(keep: Compression, order: torch.memory_format) -> None:
    """And those of 4 bits are not."""
    x, affine = image(0, WIDE, order, torch.float32), affine_of(WIDE, torch.float32)
    dy = image(8, WIDE, order, torch.float32).detach()
    y = ours("batch", x, affine, activation="relu", keep=keep).y
    expected = torchs("batch", x, affine).relu()
    found = torch.autograd.grad(y, [x, *affine], dy)
    exact = torch.autograd.grad(expected, [x, *affine], dy)
    bound = bounds(x, torch.where(expected > 0, dy, 0.0), affine[0])
    rounding = 1e-5  # float32's, of sums of 64 terms of order 1
    for ours_, theirs, off in zip(found, exact, bound, strict=False):
        assert ((ours_ - theirs).abs() <= off + rounding).all() == (keep is not INT4)
    # Of the bias no packed number is part: a wrong sign would be.
    assert torch.allclose(found[2], exact[2], atol=rounding)


def test_relu_passes_gradients_as_signs_say_not_as_packs_do() -> None:
    """Half of the elements are nearer to zero than a step of their group, and a pack has no sign of
    them."""
    x = image(0, (2, 1, 8, 8), dtype=torch.float32)
    with torch.no_grad():
        x.mul_(1e-3)[0, 0, 0, :3] = torch.tensor([1.0, 1.01, 1.02])  # two are kept exactly
    lower = (x.mean() / x.std(correction=0)).detach()  # where zero is, of what is normalised
    affine = torch.ones(1), lower.reshape(1)
    residual = torch.zeros_like(x).requires_grad_()
    y = ours("batch", x, affine, activation="relu", residual=residual).y
    (passed,) = torch.autograd.grad(y, residual, torch.ones_like(y))
    assert torch.equal(passed, (torchs("batch", x, affine) > 0).float())
    assert 32 < passed.sum() < 96
    packed = ours("batch", x, affine).kept
    again = decode(packed.buffer, x.shape, torch.float32, packed.spec) + affine[1] > 0
    assert (again != passed.bool()).sum() > 10


@every_order
@pytest.mark.parametrize("keep", [INT8, NEAREST], ids=["stochastic", "nearest"])
def test_pack_is_the_codecs_of_the_normalised_input(keep: Compression, order: Any) -> None:
    x = image(0, WIDE, order, torch.float32)
    random.manual_seed(3)
    kept = ours("batch", x, (None, None), keep=keep).kept  # type: ignore[arg-type]
    random.manual_seed(3)
    n, _ = reference.normalise(x.detach(), reference.Shape(0, x.shape), 1e-5)
    flat = n.movedim(1, -1) if order == torch.channels_last else n
    assert torch.equal(kept.buffer, pack(flat.reshape(-1), keep.format()).buffer)


@pytest.mark.parametrize("shape", [(0, 6, 5, 5), (4, 6, 0, 5)])
def test_empty_batches_work(shape: tuple[int, ...]) -> None:
    x, running = image(0, shape, dtype=torch.float32), (torch.zeros(6), torch.ones(6))
    y = batch_norm(x, *running, activation="relu").y
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == dx.shape == shape
