"""The input of a checkpoint that a norm reads is packed as what is normalised.

The bound on gradients is that of test_compress_norms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import SMALL, Tensors, bent, cosine
from torch import Tensor, nn
from torch.nn import functional

import vramx
from vramx.recompute import inputs, norms, verdicts

COSINE = 0.999
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(96),
    "two": lambda: nn.LayerNorm((48, 96)),
    "group": lambda: nn.GroupNorm(4, 48),
    "batch": lambda: nn.BatchNorm1d(48, eps=1e-12),
    "instance": lambda: nn.InstanceNorm1d(48, affine=True),
}
# The shape of what has a mean of its own, and a scale.
PARTS = {"layer": (8, 48, 1), "two": (8, 1, 1), "group": (8, 4, 1), "batch": (48, 1)}


@pytest.fixture(autouse=True)
def _forget() -> None:
    verdicts._seen.clear()


def uneven(name: str, mean: float, decades: float) -> Tensor:
    torch.manual_seed(0)
    shape = PARTS.get(name, (8, 48, 1))
    means, scales = torch.randn(shape) * mean, 10 ** ((torch.rand(shape) - 0.5) * decades)
    if name == "group":
        means, scales = (part.repeat_interleave(12, 1) for part in (means, scales))
    return (torch.randn(8, 48, 96) + means) * scales


def worst(found: Tensors, exact: Tensors) -> float:
    return min(cosine([a], [b]) for a, b in zip(found, exact, strict=True))


def worst_cosine(norm: nn.Module, x: Tensor, region: Any = None, level: Any = SMALL) -> float:
    def run(level: Any) -> Tensors:
        leaf = x.detach().requires_grad_()
        y = vramx.checkpoint(region or norm, leaf * 1, level=level)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        return torch.autograd.grad(y, [leaf, *norm.parameters()], dy)

    run(level)  # watched
    return worst(run(level), run("keep"))


def leave_out(monkeypatch: pytest.MonkeyPatch, *parts: tuple[Any, str]) -> None:
    """Plant a defect: these functions find nothing."""
    for owner, name in parts:
        monkeypatch.setattr(owner, name, lambda *_, **__: None)


@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize(("mean", "decades"), [(1e3, 0), (1e2, 4)])
@pytest.mark.parametrize("name", NORMS)
def test_neither_mean_nor_scale_costs_precision(
    name: str, mean: float, decades: float, last: bool
) -> None:
    x = uneven(name, mean, decades)
    if last:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert worst_cosine(NORMS[name](), x) >= COSINE


@pytest.mark.parametrize("name", NORMS)
def test_inputs_that_are_packed_as_other_numbers_are_found(name: str, monkeypatch: Any) -> None:
    leave_out(monkeypatch, (norms.Readers, "look_at"), (inputs, "of_rows"))
    assert worst_cosine(NORMS[name](), uneven(name, 1e3, 0)) < 0.99


def test_what_moves_to_the_host_is_normalised_too() -> None:
    level = vramx.Compression(min_bytes=0, offload="cpu")
    assert worst_cosine(nn.LayerNorm(96), uneven("layer", 1e3, 0), level=level) >= COSINE


def test_a_norm_of_a_view_or_of_a_copy_is_seen_and_one_of_a_part_packs_as_ever() -> None:
    norm, half = nn.LayerNorm(96), nn.LayerNorm(48)
    for region in (
        lambda x: norm(x.view(-1, 96)),
        lambda x: norm(x.clone()),
        lambda x: norm(x.transpose(0, 1)).tanh() + x.transpose(0, 1),
        lambda x: norm(x.double().float()),
    ):
        assert worst_cosine(norm, uneven("layer", 1e3, 0), region) >= COSINE
    assert worst_cosine(half, torch.randn(8, 48, 96), lambda x: half(x[..., :48])) >= COSINE


def tokens(width: int) -> Tensor:
    """Return rows of which the first, a class token, is a thousandth of the others."""
    x = torch.randn(4, 17, width, generator=torch.Generator().manual_seed(2))
    return torch.cat([x[:, :1] * 1e-3, x[:, 1:]], 1)


def of_the_first(region: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: region(x)[:, :1]


NOT_SEEN: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "joined": lambda norm: lambda x: norm(torch.cat([x[:, :1], x[:, 1:] * 2], 1)),
    "in another order": lambda norm: lambda x: norm(x.roll((1, -1), (1, 2))).roll(-1, 1),
    "written out": lambda norm: (
        lambda x: (
            norm.weight * (x - x.mean(-1, True)) * (x.var(-1, keepdim=True) + 1e-12).rsqrt()
            + norm.bias
        )
    ),
    "added to": lambda norm: lambda x: norm(x + norm.weight * 1e-4),
}


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "not decided"])
@pytest.mark.parametrize("name", NOT_SEEN)
def test_rows_that_share_groups_are_packed_each_in_its_own_scale(
    name: str, decided: bool, monkeypatch: Any
) -> None:
    if not decided:
        leave_out(monkeypatch, (inputs, "of_rows"), (norms.Readers, "_note_mean"))
    norm = nn.LayerNorm(96, eps=1e-12)
    found = worst_cosine(norm, tokens(96), of_the_first(NOT_SEEN[name](norm)))
    assert found >= COSINE if decided else found < 0.99


# Of rows or columns of unlike scale.
OF_SIZES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "short rows": (lambda x: functional.rms_norm(x, (16,), eps=1e-12), 16),
    "lengths of short rows": (lambda x: functional.normalize(x, dim=-1), 16),
    "lengths of rows": (lambda x: functional.normalize(x, dim=-1), 96),
    "lengths across rows": (lambda x: functional.normalize(x, dim=1), 96),
    "a deviation": (lambda x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-12), 96),
    "a root": (lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt(), 48),
}


@pytest.mark.parametrize("name", OF_SIZES)
def test_norms_that_divide_by_sizes_are_packed_as_what_they_give(name: str) -> None:
    norm, width = OF_SIZES[name]
    dim = 1 if name == "lengths across rows" else 2
    count = width if dim == 1 else 48
    scales = torch.logspace(-3, 3, count)[torch.arange(count) * 7 % count]  # in no order
    scales = scales if dim == 1 else scales.view(1, 48, 1)
    x = torch.randn(8, 48, width, generator=torch.Generator().manual_seed(3)) * scales

    def gradient(level: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        y = vramx.checkpoint(lambda z: bent(norm(z)), leaf * 1, level=level)
        (found,) = torch.autograd.grad(y, leaf, torch.ones_like(y).cumsum(dim).cos())
        return found

    found, exact = gradient(SMALL), gradient("keep")
    assert not torch.equal(found, exact), "nothing was packed"
    assert functional.cosine_similarity(found, exact, dim, eps=0).min() >= COSINE


def written_out(x: Tensor, dim: int) -> Tensor:
    off = x - x.mean(dim, keepdim=True)
    return off * (off.square().mean(dim, keepdim=True) + 1e-12).rsqrt()


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "not seen"])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_norm_that_is_written_out_is_seen_by_its_mean(
    dim: int, seen: bool, monkeypatch: Any
) -> None:
    """Of channels, as layer norms of images are, and of rows. Groups have parts of one row."""
    if not seen:
        leave_out(monkeypatch, (norms.Readers, "_note_mean"))
    x = torch.randn(8, 48, 128, generator=torch.Generator().manual_seed(0)) + 1e3
    found = worst_cosine(nn.Identity(), x, lambda x: written_out(x, dim).tanh() * x.shape[0])
    assert found >= COSINE if seen else found < 0.99


SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": Tensor.square,
    "power": lambda x: x**2,
    "product": lambda x: x * x,
    "cast": lambda x: x.float().square().clone(),
}


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "not seen"])
@pytest.mark.parametrize("square", SQUARES)
def test_columns_that_their_squares_make_alike_are_packed_alike(
    square: str, seen: bool, monkeypatch: Any
) -> None:
    if not seen:
        leave_out(monkeypatch, (norms, "_is_square"))
    x = torch.randn(16, 32, 128, generator=torch.Generator().manual_seed(0))

    def region(x: Tensor) -> Tensor:
        return x * SQUARES[square](x).mean(1, keepdim=True).rsqrt()

    found = worst_cosine(nn.Identity(), x * torch.logspace(-3, 3, 128), region)
    assert (found >= COSINE) is seen  # 0.8, or not a number, where a column is lost


@pytest.mark.parametrize("norm", [lambda x: x.mean(0), lambda x: functional.normalize(x, dim=0)])
def test_a_mean_or_a_norm_of_a_single_number_is_recomputed(norm: Any) -> None:
    leaf = torch.tensor(3.0, requires_grad=True)
    vramx.checkpoint(lambda x: norm(x) * x, leaf * 1, level=SMALL).backward()
    assert leaf.grad is not None
    (expected,) = torch.autograd.grad(norm(leaf) * leaf, leaf)
    torch.testing.assert_close(leaf.grad, expected, rtol=0.02, atol=0)


# Every second place of these is 300 times larger, as what stands for padding, and counts for
# nothing behind a layer of the last dimension. "channels last" is an image's layout in memory.
LAYOUTS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "rows": lambda head, x: head(x),
    "of four dimensions": lambda head, x: head(x.unflatten(0, (4, -1))).flatten(0, 1),
    "channels last": lambda head, x: (
        functional.conv2d(x.permute(0, 2, 1).unsqueeze(2), head.weight[:, :, None, None], head.bias)
        .squeeze(2)
        .permute(0, 2, 1)
    ),
}


def small_rows(name: str, width: int, level: Any, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return the gradient of a layer that reads rows of a width, in a checkpoint."""
    torch.manual_seed(0)
    head, x = nn.Linear(width, 8, dtype=dtype), torch.randn(16, 16, width)
    x[:, 1::2] *= 300
    shape = {"of four dimensions": (4, 4, 16), "channels last": (16, 1, 16)}.get(name, (16, 16))
    given = (x.to(dtype).requires_grad_() * 1).view(*shape, width)
    if name == "channels last":
        given = given.permute(0, 3, 1, 2)

    def region(given: Tensor) -> Tensor:
        rows = given.permute(0, 2, 3, 1) if name == "channels last" else given
        return LAYOUTS[name](head, rows.reshape(16, 16, width))

    y = vramx.checkpoint(region, given, level=level)[:, ::2]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return torch.autograd.grad(y, [head.weight], dy)


@pytest.mark.parametrize("width", [4, 8, 16, 24, 48, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_short_rows_beside_much_larger_ones_are_as_exact(name: str, width: int) -> None:
    assert worst(small_rows(name, width, SMALL), small_rows(name, width, "keep")) >= COSINE


@pytest.mark.parametrize("width", [4, 8, 16, 24, 48, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_short_rows_that_share_a_scale_are_found(name: str, width: int, monkeypatch: Any) -> None:
    leave_out(monkeypatch, (inputs, "of_rows"), (inputs, "has_short_rows"))
    assert worst(small_rows(name, width, SMALL), small_rows(name, width, "keep")) < 0.9


def test_a_norm_goes_before_a_mean() -> None:
    norm, x = nn.LayerNorm(128), uneven("layer", 1e3, 0)
    x = torch.cat([x, x[..., :32]], -1)
    assert worst_cosine(norm, x, lambda x: norm(x) * x.mean(1, keepdim=True).tanh()) >= COSINE


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "not decided"])
def test_a_fused_block_has_small_rows_as_exactly_as_large_ones(
    decided: bool, monkeypatch: Any
) -> None:
    if not decided:
        leave_out(monkeypatch, (inputs, "of_rows"))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        96, 4, 192, 0.0, functional.gelu, layer_norm_eps=1e-12, batch_first=True, norm_first=True
    )
    # Of a row nothing but itself is looked at.
    nn.init.zeros_(layer.self_attn.out_proj.weight)
    learnt = [layer.norm2.weight, layer.linear1.weight, layer.linear2.weight]
    x = tokens(96)

    def gradient() -> Tensors:
        y = layer(x.clone().requires_grad_() * 1)[:, :1]
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad(y, learnt, dy)

    exact = gradient()
    vramx.optimize(layer, "recompute_all", min_bytes=0)
    found = worst(gradient(), exact)
    assert found >= COSINE if decided else found < 0.99


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((4, 17, 96), (2,)),
        ((4, 9, 3, 24), (3,)),
        ((4, 9, 24), (2,)),
        ((9, 16), (1,)),
        ((4, 9, 12), (2,)),
        ((4, 9, 6), (1, 2)),
        ((4, 17, 128), None),  # groups have parts of one row alone
        ((4, 8, 2, 128), None),
        ((5, 3), None),  # one row
        ((96,), None),
    ],
)
def test_rows_are_what_lies_together_and_shares_groups(
    shape: tuple[int, ...], dims: tuple[int, ...] | None
) -> None:
    found = norms.of_rows(torch.zeros(shape), 128)
    assert (found and found.dims) == dims


@pytest.mark.parametrize(
    ("region", "of_planes"),
    [
        (nn.Conv2d(24, 4, 3), True),
        (nn.MaxPool2d(2), True),
        (lambda x: functional.conv2d(x.contiguous(), torch.ones(4, 24, 1, 1)), True),
        (lambda x: functional.interpolate(x, scale_factor=2), True),
        (nn.Linear(40, 4), False),
        (lambda x: functional.conv2d(x.permute(0, 3, 1, 2), torch.ones(4, 40, 1, 1)), False),
    ],
    ids=["conv", "pool", "conv of a copy", "interpolate", "linear", "conv of the last dimension"],
)
def test_places_of_an_image_that_lie_side_by_side_are_no_rows(region: Any, of_planes: bool) -> None:
    """They are as large as each other, and a scale for each few would be much of what is kept."""
    x = torch.randn(2, 24, 40, 40, requires_grad=True)
    vramx.checkpoint(region, x * 1, level=SMALL)
    (key,) = verdicts._seen
    verdict = verdicts.known(key)
    assert verdict is not None
    assert (verdict.planes == {0}) == of_planes
    found = norms.of_rows(torch.zeros(2, 24, 40, 40), 128, of_planes=of_planes)
    assert found is not None
    assert found.dims == ((2, 3) if of_planes else (3,))


def test_each_of_several_inputs_has_its_own_norm() -> None:
    rows, channels = nn.LayerNorm(96), nn.BatchNorm1d(48)
    leaves = [uneven(name, 1e3, 0).requires_grad_() for name in ("layer", "batch")]

    def gradient(level: Any) -> Tensors:
        one, other = (leaf * 1 for leaf in leaves)
        y = vramx.checkpoint(lambda a, b: channels(b) * rows(a), one, other, level=level)
        return torch.autograd.grad(y.square().sum(), leaves)

    assert worst(gradient(SMALL), gradient("keep")) >= COSINE


def test_of_calls_with_other_arguments_alike_each_has_its_own_norm() -> None:
    """What is known of f(x, x, y) is nothing that f(x, y, y) may go by."""
    norm = nn.LayerNorm(128)  # rows of whole groups, which are normalised for a norm alone
    torch.manual_seed(0)
    leaves = [torch.randn(8, 48, 128).add(1e3).requires_grad_() for _ in range(2)]

    def region(one: Tensor, two: Tensor, three: Tensor) -> Tensor:
        return one.sum(0) + norm(two) + three.sum(0)

    def gradient(numbers: tuple[int, ...], level: Any) -> Tensors:
        inputs = [leaf * 1 for leaf in leaves]
        y = vramx.checkpoint(region, *(inputs[number] for number in numbers), level=level)
        return torch.autograd.grad(y.square().sum(), list(norm.parameters()))

    for numbers in ((0, 0, 1), (0, 1, 1)):
        assert worst(gradient(numbers, SMALL), gradient(numbers, "keep")) >= COSINE


def sequences(channels: int) -> Tensor:
    """Return sequences of 50 places of which what stands behind the end is 1000 times larger."""
    x = torch.randn(8, channels, 50, generator=torch.Generator().manual_seed(3))
    return torch.where(torch.arange(50) < 25, x, x * 1e3)


class Sequential(nn.Module):
    """A convolution over places, and a norm of each: small places count as much as large ones."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Conv1d(channels, 32, kernel), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.norm(self.layer(x).transpose(1, 2))).cumsum(-1)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("channels", [16, 40])
def test_places_of_a_sequence_have_scales_of_their_own(channels: int, kernel: int) -> None:
    assert worst_cosine(Sequential(channels, kernel), sequences(channels)) >= 0.995


def test_places_that_share_scales_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, (inputs, "of_places"))
    assert worst_cosine(Sequential(16, 1), sequences(16)) < 0.95


def test_channels_of_a_sequence_may_differ_in_scale() -> None:
    x = torch.randn(8, 16, 256, generator=torch.Generator().manual_seed(3))
    x[:, ::2] *= 1e3
    layer = nn.Conv1d(16, 16, 3, groups=16)
    assert worst_cosine(layer, x, lambda x: functional.silu(layer(x)).cumsum(-1)) >= 0.99
