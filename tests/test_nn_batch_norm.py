"""Batch, group and instance norm and convolutions on a CPU: results, gradients, how they are used.

With level "keep" gradients must be torch's own; packs are in test_nn_channel_norm_packs.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from channel_norm_tools import (
    ACTIVATIONS,
    SHAPE,
    affine_of,
    close,
    every_activation,
    every_kind,
    every_order,
    image,
    ours,
    torchs,
)
from norm_tools import EXACT, INT8, gradients
from torch import Tensor, nn

import vramx.nn
from vramx.compression.config import Compression
from vramx.nn.functional import conv2d, group_norm

pytestmark = pytest.mark.usefixtures("seeded")


@every_kind
@every_activation
@every_order
def test_exact_gradients_are_torchs(kind: str, word: str, order: torch.memory_format) -> None:
    x, affine, weight = image(0, order=order), affine_of(SHAPE), image(4, (5, 6, 3, 3))
    every = [x, *affine, weight]

    def fused() -> list[Tensor]:
        normed = ours(kind, x, affine, activation=word, keep=EXACT)
        return [normed.y, conv2d(normed, weight, padding=1, stride=2, keep=EXACT)]

    def plain() -> list[Tensor]:
        y = ACTIVATIONS[word](torchs(kind, x, affine))
        return [y, functional.conv2d(y, weight, padding=1, stride=2)]

    pairs = [*zip(fused(), plain(), strict=True)]
    pairs += zip(gradients(fused, every), gradients(plain, every), strict=True)
    assert all(close(a, b) for a, b in pairs)


@every_order
@every_activation
def test_exact_gradients_with_a_residual_are_torchs(word: str, order: torch.memory_format) -> None:
    x, residual, affine = image(0, order=order), image(1), affine_of(SHAPE)
    every = [x, residual, *affine]
    options = {"activation": word, "residual": residual, "keep": EXACT}

    def plain() -> list[Tensor]:
        return [ACTIVATIONS[word](torchs("batch", x, affine) + residual)]

    found = gradients(lambda: [ours("batch", x, affine, **options).y], every)
    assert all(close(a, b) for a, b in zip(found, gradients(plain, every), strict=True))
    assert ours("batch", x, affine, **options).y.stride() == x.stride()


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_running_statistics_are_torchs(momentum: float | None, dtype: torch.dtype) -> None:
    """Means of 100 numbers of order 1, in another order: within 100 units of the type."""
    norms = [
        module(6, momentum=momentum, dtype=dtype)
        for module in (nn.BatchNorm2d, vramx.nn.BatchNorm2d)
    ]
    for step in range(3):
        results = [norm(image(step, dtype=dtype)) for norm in norms]
        assert torch.allclose(*results, rtol=1e-5, atol=1e-6)
    theirs, found = (norm.state_dict() for norm in norms)
    assert list(theirs) == list(found)
    unit = 100 * torch.finfo(dtype).eps
    for name, value in theirs.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=unit, atol=unit), name
    results = [norm.eval()(image(9, dtype=dtype)) for norm in norms]
    assert torch.allclose(*results, rtol=1e-5, atol=1e-6)


MODULES = [
    (nn.BatchNorm1d, vramx.nn.BatchNorm1d, (6,), (4, 6)),
    (nn.BatchNorm1d, vramx.nn.BatchNorm1d, (6,), (4, 6, 5)),
    (nn.BatchNorm3d, vramx.nn.BatchNorm3d, (6,), (2, 6, 3, 2, 2)),
    (nn.GroupNorm, vramx.nn.GroupNorm, (2, 6), (4, 6)),
    (nn.GroupNorm, vramx.nn.GroupNorm, (3, 6), (2, 6, 3, 2, 2)),
    (nn.InstanceNorm1d, vramx.nn.InstanceNorm1d, (6,), (6, 5)),
    (nn.InstanceNorm2d, vramx.nn.InstanceNorm2d, (6, 1e-5, 0.1, True), SHAPE),
    (nn.InstanceNorm2d, vramx.nn.InstanceNorm2d, (6, 1e-5, 0.1, True, True), SHAPE),
    (nn.InstanceNorm3d, vramx.nn.InstanceNorm3d, (6,), (2, 6, 3, 2, 2)),
    (nn.Conv2d, vramx.nn.Conv2d, (6, 4, 3), SHAPE),
    (nn.Conv2d, vramx.nn.Conv2d, (6, 4, 3, 1, "same"), SHAPE),
    (nn.Conv2d, vramx.nn.Conv2d, (6, 4, 3, 1, 1, 1, 1, True, "reflect"), SHAPE),
    (nn.Conv2d, vramx.nn.Conv2d, (6, 6, 3, 2, 1, 2, 3), (6, 9, 9)),
    (nn.Conv3d, vramx.nn.Conv3d, (6, 4, 2), (2, 6, 3, 2, 2)),
]


@pytest.mark.parametrize(("theirs", "found", "arguments", "shape"), MODULES)
def test_modules_are_torchs(theirs: type, found: type, arguments: Any, shape: Any) -> None:
    x = image(0, shape, dtype=torch.float32)
    expected, module = theirs(*arguments), found(*arguments)
    module.load_state_dict(expected.state_dict())
    module.keep = EXACT
    assert isinstance(module, theirs)
    assert torch.allclose(module(x), expected(x), rtol=1e-5, atol=1e-6)
    pairs = zip(
        gradients(lambda: [module(x)], [x, *module.parameters()]),
        gradients(lambda: [expected(x)], [x, *expected.parameters()]),
        strict=True,
    )
    # Terms of order 1, of at most 100 of which float32 sums some: 1e-5 is 80 of its units.
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)


def penalties(outputs: Sequence[Tensor], every: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the squares of gradients, which pass through all second ones."""
    loss = sum(y.pow(3).sum() for y in outputs)
    found = torch.autograd.grad(loss, every, create_graph=True)
    total = sum(gradient.square().sum() for gradient in found)
    return list(torch.autograd.grad(total, every))


@every_kind
@pytest.mark.parametrize("word", ["none", "leaky_relu", "silu"])
def test_second_derivatives_are_torchs(kind: str, word: str) -> None:
    x, affine, weight = image(0), affine_of(SHAPE), image(4, (2, 6, 2, 2))
    every = [x, *affine, weight]
    normed = ours(kind, x, affine, activation=word, keep=EXACT)
    found = penalties([normed.y, conv2d(normed, weight, keep=EXACT)], every)
    y = ACTIVATIONS[word](torchs(kind, x, affine))
    expected = penalties([y, functional.conv2d(y, weight)], every)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("keep", [INT8, EXACT], ids=["int8", "exact"])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiles_without_a_break(keep: Compression) -> None:
    torch.compiler.reset()
    norm = vramx.nn.BatchNorm2d(6)
    norm.keep, norm.activation = keep, "relu"
    convolution = vramx.nn.Conv2d(6, 6, 3, padding=1, bias=False)
    convolution.keep = keep
    x = image(0, dtype=torch.float32)

    def block(x: Tensor) -> tuple[Tensor, ...]:
        y = norm(convolution(norm.normed(convolution(x))), x)
        return (group_norm(y, 3, activation="silu", keep=keep).y,)

    every = [x, *norm.parameters(), *convolution.parameters()]
    expected = gradients(lambda: block(x), every)
    state = copy.deepcopy(norm.state_dict())
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = gradients(lambda: compiled(x), every)
    for a, b in zip(found, expected, strict=True):
        # Two draws of the noise, each of about 1 %.
        bound = 0.1 * b.norm() + 1e-3 if keep is INT8 else 1e-4 * b.norm() + 1e-4
        assert (a - b).norm() <= bound
    assert norm.num_batches_tracked == state["num_batches_tracked"] + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_types_under_autocast_are_torchs(dtype: torch.dtype) -> None:
    x, affine = image(0, dtype=dtype), affine_of(SHAPE, torch.float32)
    weight = image(4, (5, 6, 3, 3)).float().detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        normed = ours("batch", x, affine, activation="relu")
        y = conv2d(normed, weight)
        expected = torchs("batch", x, affine).relu()
        assert normed.y.dtype == expected.dtype
        assert y.dtype == functional.conv2d(expected, weight).dtype == torch.bfloat16
    found = torch.autograd.grad(y.float().sum(), [x, *affine, weight])
    assert [each.dtype for each in found] == [dtype, *[torch.float32] * 3]
