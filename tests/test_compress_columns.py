"""Columns of a layer's data that its weight has a factor for count alike, whatever their scale.

So do those that a convolution reads by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear
from torch.nn.utils import parametrize

import vramx
from vramx.compression.policy import columns, looks, plans, policy
from vramx.recompute import elements

WIDTH, OUT, ROWS = 64, 32, 256
SMALL = vramx.Compression(min_bytes=0)
# What is exact differs by the rounding of a sum alone.
COSINE = 0.9999


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)
    vramx.manual_seed(0)


def scale() -> Tensor:
    """Return what raw features are of: a quarter of 1e4 beside others of 0.05."""
    return torch.where(torch.arange(WIDTH) % 4 == 0, 1e4, 0.05)


class Unscaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = scale()

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.scale


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: linear(x, w / scale()),
    "times a row": lambda x, w: linear(x, (1 / scale())[None] * w),
    "matmul": lambda x, w: x @ (w / scale()).t(),
    "of columns": lambda x, w: x @ (w.t() / scale()[:, None]),
    "a weight first": lambda x, w: (w / scale()) @ x.t(),
    "addmm": lambda x, w: torch.addmm(torch.zeros(OUT), x, (w / scale()).t()),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w / scale()),
    "tensordot": lambda x, w: torch.tensordot(x, w / scale(), ([1], [1])),
    "bmm": lambda x, w: torch.bmm(x[None], (w / scale()).t()[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(1, 1, OUT), x[None], (w / scale()).t()[None]),
    "three dimensions": lambda x, w: linear(x.view(4, -1, WIDTH), (w / scale()).double().float()),
}
ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda w: w,
    "a factor for each row": lambda w: w * torch.rand(OUT, 1),
    "a mask": lambda w: w * (torch.rand(OUT, WIDTH) < 0.5),
    "a number": lambda w: w * 0.5,
    "weight norm": lambda w: w / w.norm(dim=1, keepdim=True),
}


@pytest.fixture(params=["hooks", "checkpoint"])
def call(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tensor]]:
    def hooks(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        with vramx.compress(min_bytes=0):
            return function(x, weight)

    def checkpoint(
        function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        return vramx.checkpoint(function, x, weight, level=SMALL)

    return {"hooks": hooks, "checkpoint": checkpoint}[request.param]


def gradient(run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the gradient of a weight of data that has a graph: what is none is kept anyway."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(OUT, WIDTH, generator=draw, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, generator=draw).requires_grad_() * scale()
    y = run(x, weight)
    (y * torch.randn(y.shape, generator=draw)).sum().backward()
    assert weight.grad is not None
    return weight.grad


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.cosine_similarity(one.double().flatten(), other.double().flatten(), 0).item()


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_undoes_the_scale_of_columns_has_its_gradient(
    way: str, call: Callable[..., Tensor]
) -> None:
    for _ in range(2):
        found = gradient(lambda x, w: call(WAYS[way], x, w))
        assert cosine(found, gradient(WAYS[way])) > COSINE


def test_packed_columns_lose_what_is_small(
    call: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect that the test above finds: no weight is seen to undo a scale."""
    for owner, name in ((looks, "undoes_columns"), (policy, "undoes_columns"),
                        (elements, "is_scaled")):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda *_: False)

    def other(x: Tensor, weight: Tensor) -> Tensor:  # none that a checkpoint has a verdict on
        return linear(x, weight / scale())

    assert cosine(gradient(lambda x, w: call(other, x, w)), gradient(other)) < 0.9


def test_a_parametrization_that_undoes_it_is_seen() -> None:
    layer = nn.Linear(WIDTH, OUT)
    parametrize.register_parametrization(layer, "weight", Unscaled())
    original = layer.parametrizations["weight"].original
    x = torch.randn(ROWS, WIDTH).requires_grad_() * scale()
    found = []
    for min_bytes in (1 << 40, 0):
        with vramx.compress(min_bytes=min_bytes):
            y = layer(x)
        found += torch.autograd.grad(y.square().sum(), original)
    assert cosine(*found) > COSINE


@pytest.mark.parametrize("name", ALIKE)
def test_other_weights_leave_their_data_packed(name: str) -> None:
    weight = torch.randn(OUT, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 2
    with vramx.compress(min_bytes=0) as stats:
        linear(x, ALIKE[name](weight))
    assert stats.operations["linear"].kept_bytes < x.nbytes / 2


def test_data_that_the_gain_of_a_norm_multiplies_is_packed() -> None:
    gain = torch.ones(WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 2
    with vramx.compress(min_bytes=0) as stats:
        (x * gain) @ torch.randn(WIDTH, OUT, requires_grad=True)
    assert stats.operations["matmul"].kept_bytes < x.nbytes / 2


def test_a_weight_whose_graph_is_gone_is_taken_for_one_that_undoes_it() -> None:
    made = torch.randn(OUT, WIDTH, requires_grad=True) * scale()
    made.sum().backward()
    assert columns.is_scaled(made, -1)


# Channels that a convolution reads by themselves, and that lie together in memory.

BY_CHANNEL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "places": lambda x, w: functional.conv1d(x.transpose(1, 2), w, groups=WIDTH),
    "pixels": lambda x, w: functional.conv2d(
        x.unflatten(1, (8, -1)).permute(0, 3, 1, 2), w[..., None], groups=WIDTH
    ),
}


def cosine_by_channel(name: str) -> float:
    """Return the cosine of a weight's gradient, behind which a norm makes channels count alike."""
    x = torch.randn(4, 64, WIDTH)
    x[..., ::7] *= 100
    weight, towards = torch.randn(WIDTH, 1, 3, requires_grad=True), torch.randn(4, WIDTH, 1024)
    found = []
    for options in (SMALL, vramx.Compression(level="keep")):
        leaf = x.clone().requires_grad_()
        with vramx.compress(options) as stats:
            y = functional.instance_norm(BY_CHANNEL[name](leaf * 1, weight).flatten(2))
        (gradient,) = torch.autograd.grad((y * towards[..., : y.shape[2]]).sum(), weight)
        found.append(gradient)
    assert not stats.packed.tensors
    return float(functional.cosine_similarity(*(each.flatten() for each in found), dim=0))


@pytest.mark.parametrize("name", BY_CHANNEL)
def test_small_channels_that_a_convolution_reads_by_themselves_have_their_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the root of an element 100 times smaller is a sixth of it, where many add up."""
    assert cosine_by_channel(name) > 0.99
    monkeypatch.setattr(plans, "reads_columns", lambda *_: False)
    plans.plans_of.cache_clear()
    assert cosine_by_channel(name) < 0.95
    plans.plans_of.cache_clear()


def test_a_tensor_that_a_layer_reads_as_well_is_packed_once() -> None:
    x = torch.randn(4, 64, WIDTH, requires_grad=True)
    layer, weight = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(WIDTH, 1, 3))
    readers = [layer, lambda y: BY_CHANNEL["places"](y, weight)]
    for order in (readers, readers[::-1]):
        y = x * 1
        with vramx.compress(SMALL) as stats:
            made = [reader(y) for reader in order]
        assert stats.packed.seen_bytes == y.nbytes
        del made
