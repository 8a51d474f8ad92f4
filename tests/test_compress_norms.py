"""What norms save is packed so that what they subtract and divide by costs no precision.

Rows and channels differ by up to 10,000 times, and in a group with a larger row a small one is next
to nothing; each gradient has a cosine of 0.999 with the exact one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compress_tools import worst_cosine
from torch import Tensor, nn
from torch.nn import functional

import vramx
from vramx.compression import graph
from vramx.compression.codec import normalised
from vramx.compression.policy import graph_policy, plans
from vramx.compression.policy.policy import Choice, SavePolicy

COSINE = 0.999
NORMS: dict[str, Any] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "group": lambda width: nn.GroupNorm(2, width),
}
in_graph = pytest.param(
    "graph",
    marks=pytest.mark.skipif(graph._hook_context is None, reason="this torch inlines no hooks"),
)
WIDTHS = (8, 24, 48, 64, 96, 128, 192, 320)


def cosine_of(norm: nn.Module, x: Tensor, **options: Any) -> float:
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def gradients(module: nn.Module, x: Tensor, packed: bool) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(), *module.parameters()]
        with vramx.compress(min_bytes=0, **options) if packed else nullcontext():
            y = module(leaves[0] * 1)
        return torch.autograd.grad(y, leaves, dy.to(y.dtype))

    found = gradients(norm, x, True)
    exact = gradients(norm.double(), x.double(), False)
    norm.float()
    return worst_cosine(found, exact)


def uneven(rows: int, *shape: int) -> Tensor:
    """Return rows of different scale, in no order."""
    torch.manual_seed(0)
    scales = torch.logspace(-2, 2, rows)[torch.randperm(rows)]
    return torch.randn(rows, *shape) * scales.view(-1, *(1,) * len(shape))


class BehindALayer(nn.Module):
    """Rows of different scale go through a layer without a bias, and a norm makes them alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x * functional.silu(x)))


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "not decided"])
@pytest.mark.parametrize("width", [16, 24, 96, 100])
@pytest.mark.parametrize("way", ["hooks", in_graph])
def test_rows_that_a_layer_reads_do_not_share_a_group(
    way: str, width: int, decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans.plans_of.cache_clear()
    graph.hooks.cache_clear()
    if not decided:
        monkeypatch.setattr(plans, "shared_row", lambda _: 0)
        monkeypatch.setattr(graph, "LEAST_OF_ROWS", 1 << 20)
        monkeypatch.setattr(graph, "_share_groups", lambda *_: False)
    torch.manual_seed(0)
    region = BehindALayer(width)
    x = torch.randn(4, 17, width) * torch.logspace(-3, 0, 17)[torch.randperm(17)].unsqueeze(1)
    dy = torch.randn(x.shape)

    def gradient(packed: bool) -> Tensor:
        torch._dynamo.reset()
        called = torch.compile(region, backend="aot_eager") if way == "graph" else region
        context = vramx.compress if way == "hooks" else vramx.compressed_graphs
        with context(min_bytes=0) if packed else nullcontext():
            y = called(x.clone().requires_grad_() * 1)
        return torch.autograd.grad(y, region.layer.weight, dy)[0]

    near = worst_cosine([gradient(True)], [gradient(False)])
    assert near >= COSINE if decided else near < 0.99


# What adds up rows, of which every second one is 300 times larger and counts for nothing.
READERS: dict[str, Any] = {
    "linear": lambda layer, x: layer(x),
    "matmul": lambda layer, x: x @ layer.weight.t(),
    "einsum": lambda layer, x: torch.einsum("...i,oi->...o", x, layer.weight),
    "product": lambda layer, x: layer(x * x.sigmoid()),
    "square": lambda layer, x: layer(x.square()),
    "relu": lambda layer, x: layer(functional.relu(x)),
    "gelu": lambda layer, x: layer(functional.gelu(x)),
    "tanh": lambda layer, x: layer(torch.tanh(x / 300)),
    "transposed": lambda layer, x: layer(x.transpose(0, 1).contiguous().transpose(0, 1)),
    "of a part": lambda layer, x: layer(torch.cat([x, x], -1)[..., : x.shape[-1]]),
}


def beside_larger(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[..., 1::2, :] *= 300  # as what stands for padding
    return x.to(dtype)


def cosine_of_small_rows(read: Any, x: Tensor, **options: Any) -> float:
    torch.manual_seed(1)
    layer = nn.Linear(x.shape[-1], 8).to(x.dtype)
    small = torch.arange(x.shape[-2]) % 2 == 0

    def gradient(**options: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with vramx.compress(**options):
            y = read(layer, leaf * 1)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
        dy[..., ~small, :] = 0
        return [*torch.autograd.grad(y, [layer.weight, leaf], dy)]

    return worst_cosine(gradient(min_bytes=0, **options), gradient(min_bytes="1GiB"))


@pytest.mark.parametrize("level", ["int8", "int4"])
@pytest.mark.parametrize("width", [3, 8, 16, 24, 32, 48, 100, 300])
@pytest.mark.parametrize("name", READERS)
def test_rows_of_any_length_are_exact_beside_much_larger_ones(
    name: str, width: int, level: str
) -> None:
    least = COSINE if level == "int8" else 0.95
    x = beside_larger(16, 32, width)
    assert cosine_of_small_rows(READERS[name], x, level=level) >= least


@pytest.mark.parametrize("width", [8, 16, 24, 48, 100, 300])
@pytest.mark.parametrize("name", ["linear", "matmul", "relu", "tanh"])
def test_rows_that_lost_their_scale_are_found(name: str, width: int, monkeypatch: Any) -> None:
    plans.plans_of.cache_clear()
    monkeypatch.setattr(plans, "shared_row", lambda _: 0)
    assert cosine_of_small_rows(READERS[name], beside_larger(16, 32, width)) < 0.9
    plans.plans_of.cache_clear()


VIEWS: dict[str, Any] = {
    "windows": lambda x: x.unfold(0, 24, 5),  # which overlap, and have no rows of their own
    "parts of rows": lambda x: x[:960].view(40, 24)[:, :20],
    "every second row": lambda x: x[:960].view(40, 24)[::2],
    "expanded": lambda x: x[:48].view(2, 1, 24).expand(2, 9, 24),
    "expanded columns": lambda x: x[:48].view(2, 24, 1).expand(2, 24, 9),
    "in another order": lambda x: x[:960].view(4, 10, 24).transpose(0, 2),
    "interleaved": lambda x: x.as_strided((10, 3, 24), (24, 7, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_rows_of_any_view_come_back(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    view = VIEWS[name]
    layer = nn.Linear(view(x).shape[-1], 8)

    def gradient(**options: Any) -> list[Tensor]:
        with vramx.compress(**options):
            y, z = layer(view(x * 1)), view(x * 1) * view(x * 2)
        return [*torch.autograd.grad(y.square().sum() + z.sum(), [x, layer.weight])]

    assert worst_cosine(gradient(min_bytes=0), gradient(min_bytes="1GiB")) >= COSINE


def cosine_of_small_pixels(channels: int, kernel: int = 1) -> float:
    torch.manual_seed(0)
    layers = [nn.Conv2d(channels, 8, n, padding="same") for n in (3, kernel)]
    x = torch.randn(4, 8, 8, channels)
    x[:, :, 1::2] *= 300
    dy = torch.randn(4, 8, 8, 8)
    dy[:, :, :, 1::2] = 0

    def gradient(**options: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with vramx.compress(**options):
            y = [layer((leaf * 1).permute(0, 3, 1, 2)) for layer in layers]
        return [*torch.autograd.grad(y, [layers[1].weight], [torch.zeros_like(y[0]), dy])]

    return worst_cosine(gradient(min_bytes=0), gradient(min_bytes="1GiB"))


@pytest.mark.parametrize("channels", [3, 8, 24, 32, 96, 100])
def test_pixels_are_rows_of_a_convolution_with_a_kernel_of_one(channels: int) -> None:
    """One with a larger kernel reads their like before, and takes them for an image."""
    assert cosine_of_small_pixels(channels) >= COSINE


@pytest.mark.parametrize("channels", [8, 24, 32, 96, 100])
def test_pixels_that_share_a_scale_are_found(channels: int, monkeypatch: Any) -> None:
    plans.plans_of.cache_clear()
    monkeypatch.setattr(plans, "pixel_length", lambda *_: 0)
    assert cosine_of_small_pixels(channels) < 0.9
    plans.plans_of.cache_clear()


def test_rows_are_packed_once_for_all_that_read_them() -> None:
    """A row of 24 has a scale of four bytes, and a code and a part of a header for each element."""
    x, layers = torch.randn(1024, 24, requires_grad=True), [nn.Linear(24, 24) for _ in range(3)]
    with vramx.compress(min_bytes=0) as stats:
        h = x * 1
        made = [layer(h) for layer in layers] + [h * h, h @ layers[0].weight]
    assert stats.packed.kept_bytes == 1024 * 24 * (1 + 6 / 128) + 1024 * 4
    del made


@pytest.mark.parametrize(
    ("width", "dtype", "is_kept"),
    [
        (7, torch.bfloat16, True),
        (8, torch.bfloat16, False),
        (3, torch.float32, True),
        (4, torch.float32, False),
        (1, torch.float32, True),
    ],
)
def test_rows_are_kept_of_which_a_scale_leaves_too_little(
    width: int, dtype: torch.dtype, is_kept: bool
) -> None:
    x = torch.randn(4096, width, dtype=dtype, requires_grad=True)
    with vramx.compress(min_bytes=0) as stats:
        y = nn.Linear(width, 8, dtype=dtype)(x * 1)
    assert (stats.packed.tensors == 0) == is_kept
    del y


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0, 1e-40])
def test_a_row_without_a_scale_of_its_own_costs_the_next_group_nothing(bad: float) -> None:
    x = torch.randn(64, 24)
    x[3] = bad
    leaf = x.clone().requires_grad_()
    with vramx.compress(min_bytes=0):
        y = (leaf * 1).square()
    (found,) = torch.autograd.grad(y.sum(), leaf)
    assert bool(found[3].isnan().all()) == (not abs(bad) < 1)  # as in any group
    assert worst_cosine([found[11:]], [2 * x[11:]]) >= COSINE
    assert bad != 0 or found[3].count_nonzero() == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NORMS)
def test_rows_of_different_scale_do_not_share_a_group(name: str, width: int) -> None:
    assert cosine_of(NORMS[name](width), uneven(64, width)) >= COSINE


@pytest.mark.parametrize(
    ("norm", "x", "options"),
    [
        ((4, 24), uneven(64, 4, 24), {}),  # dimensions that are normalised together
        (64, uneven(64, 64), {"group_size": 1024}),  # it is made smaller
        (128, uneven(64, 128).t().contiguous().t(), {}),  # rows that are columns in memory
    ],
    ids=["dimensions", "larger group", "columns"],
)
def test_whatever_is_one_row_has_groups_of_its_own(norm: Any, x: Tensor, options: Any) -> None:
    assert cosine_of(nn.LayerNorm(norm), x, **options) >= COSINE


def test_groups_that_span_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavePolicy, "_norm", lambda self, *_: Choice(8, ""))
    assert cosine_of(nn.RMSNorm(48), uneven(64, 48)) < 0.99


# What a norm subtracts, and divides by, is not in what is packed.

MEAN_NORMS: dict[str, Any] = {
    "layer": lambda: nn.LayerNorm(96),
    "group": lambda: nn.GroupNorm(4, 48),
    "batch": lambda: nn.BatchNorm1d(48),
    "instance": lambda: nn.InstanceNorm1d(48, affine=True),
    "running": lambda: nn.InstanceNorm1d(48, affine=True, track_running_stats=True),
}
MEANS = (1e2, 1e4)  # in deviations


def far(name: str, mean: float) -> Tensor:
    """Return what is far from zero, each part that has a mean of its own elsewhere."""
    torch.manual_seed(0)
    x = torch.randn(8, 48, 96)
    parts = {"layer": (8, 48, 1), "group": (8, 4, 1), "batch": (48, 1)}.get(name, (8, 48, 1))
    means = torch.randn(parts) * mean
    return x + (means.repeat_interleave(12, 1) if name == "group" else means)


def channels_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize("name", MEAN_NORMS)
def test_a_mean_of_many_deviations_costs_no_precision(name: str, last: bool, mean: float) -> None:
    x = far(name, mean)
    assert cosine_of(MEAN_NORMS[name](), channels_last(x) if last else x) >= COSINE


@pytest.mark.parametrize("name", ["batch", "running"])
def test_an_evaluated_norm_subtracts_its_running_mean(name: str) -> None:
    norm, x = MEAN_NORMS[name](), far("batch", 1e4)
    for _ in range(40):  # until the running statistics are those of x
        norm(x)
    assert cosine_of(norm.eval(), x) >= COSINE


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "not decided"])
def test_an_evaluated_norm_has_what_is_near_its_running_mean(
    decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not decided:
        monkeypatch.setattr(normalised, "_running_mean", lambda _: None)
    x = 3 + functional.gelu(torch.randn(512, 64) * 3)
    norm = nn.BatchNorm1d(64).eval()
    norm.running_mean.fill_(3)

    def gradient(packed: bool) -> Tensor:
        leaf = x.clone().requires_grad_()
        with vramx.compress(min_bytes=0) if packed else nullcontext():
            y = norm(leaf * 1)
        # That of tanh(30 * y): what is large has none.
        slope = 1 - (y.detach() * 30).tanh() ** 2
        return torch.autograd.grad(y, norm.weight, slope)[0]

    assert (worst_cosine([gradient(True)], [gradient(False)]) >= COSINE) == decided


def test_rows_far_from_zero_before_an_rms_norm_are_no_worse_than_saved_in_bfloat16() -> None:
    """It subtracts no mean, and eight bits have few steps left of what differs in a row. Where all
    of a row is summed up behind the norm and ahead of it, the gradient hangs on that."""
    torch.manual_seed(0)
    layer, x, dy = nn.Linear(64, 64), torch.randn(32, 64), torch.randn(32, 64)

    def gradient(context: Any) -> Tensor:
        with context:
            h = layer(x)
            h = functional.rms_norm(h + h.sum(-1, keepdim=True) + 100, (64,))
            y = h + 10 * h.sum(-1, keepdim=True)
        return torch.autograd.grad((y * dy).sum(), layer.weight)[0]

    def round_computed(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        return tensor if base.is_leaf else tensor.bfloat16().float()

    exact = gradient(nullcontext())
    rounded = torch.autograd.graph.saved_tensors_hooks(round_computed, lambda saved: saved)
    allowed = float((gradient(rounded) - exact).norm())
    found = gradient(vramx.compress(min_bytes=0))
    assert float((found - exact).norm()) < allowed


def test_a_norm_of_bfloat16_gives_bfloat16_back() -> None:
    x = far("layer", 3.0).bfloat16().requires_grad_()
    with vramx.compress(min_bytes=0):
        y = functional.layer_norm(x * 1, (96,))
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("exponents", [(-3, 0), (0, 3), (-2, 2)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels last"])
def test_channels_of_different_scale_may_share_a_group(exponents: Any, last: bool) -> None:
    """8 elements a channel and an image: a group has 16 channels, or the channels of a point."""
    torch.manual_seed(0)
    x = torch.randn(64, 48, 8) * torch.logspace(*exponents, 48)[:, None]
    # Without epsilon, which would be the deviation of the smallest.
    norm = nn.BatchNorm1d(48, eps=1e-12)
    assert cosine_of(norm, channels_last(x) if last else x) >= COSINE


@pytest.mark.parametrize("name", MEAN_NORMS)
def test_inputs_of_norms_that_are_packed_as_other_numbers_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MEAN_NORMS", frozenset())
    assert cosine_of(MEAN_NORMS[name](), far(name, 1e2)) < 0.99


def test_without_its_statistics_the_input_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalised, "_statistics", lambda *_: None)
    assert cosine_of(nn.LayerNorm(96), far("layer", 1e4)) > 1 - 1e-6


def test_numbers_without_a_deviation_stay_what_they_are() -> None:
    x = torch.randn(32, 128)
    x[1] = 5.0
    x[2, 3] = torch.inf
    norm = nn.LayerNorm(128, eps=0, elementwise_affine=False)
    with vramx.compress(min_bytes=0):
        y = norm(x.requires_grad_() * 1)
    y.sum().backward()
    assert x.grad[0].isfinite().all()
    assert x.grad[3:].isfinite().all()
    assert x.grad[2].isnan().all()


def kept(module: Any, x: Tensor, **options: Any) -> tuple[int, int]:
    """Return the packed tensors and the bytes of all that is kept of data."""
    with vramx.compress(min_bytes=1024, **options) as stats:
        y = module(x.requires_grad_() * 1)
    y.sum().backward()
    assert x.grad.isfinite().all()
    return stats.packed.tensors - stats.shared_bytes // (4 * x.numel()), stats.packed.kept_bytes


def test_readers_after_the_norm_share_it_and_norms_along_other_dimensions_do_not() -> None:
    x, norm, layer = torch.randn(8, 64, 128), nn.LayerNorm(128), nn.Linear(128, 128)
    assert kept(lambda x: norm(x) + layer(x), x) == kept(norm, x)
    groups = nn.GroupNorm(4, 64)
    assert kept(lambda x: norm(x) + groups(x), x)[0] == 2


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"level": "int4"}], ids=str)
def test_what_is_normalised_takes_no_more_bytes(options: dict[str, Any]) -> None:
    x, norm, layer = torch.randn(64, 128), nn.LayerNorm(128), nn.Linear(128, 128)
    assert kept(norm, x, **options)[1] == kept(layer, x, **options)[1]


# Compiled graphs


def graph_cosine(norm: nn.Module, x: Tensor) -> float:
    def gradient(call: Any, context: Any) -> Tensor:
        leaf = x.detach().requires_grad_()
        with context:
            y = call(leaf)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        return leaf.grad

    def program(x: Tensor) -> Tensor:
        return norm(x * 1.5).sin()

    torch.compiler.reset()
    compiled = torch.compile(program, backend="aot_eager")
    found = gradient(compiled, vramx.compressed_graphs(min_bytes=0))
    return worst_cosine([found], [gradient(program, nullcontext())])


@pytest.mark.skipif(
    graph._hook_context is None, reason="this torch does not say what hooks are inlined for"
)
def test_a_compiled_graph_keeps_what_a_mean_is_subtracted_from(monkeypatch: Any) -> None:
    assert graph_cosine(nn.LayerNorm(96), far("layer", 1e4)) >= COSINE
    packed = graph_policy._HARMLESS | {"native_layer_norm_backward"}
    monkeypatch.setattr(graph_policy, "_HARMLESS", packed)
    assert graph_cosine(nn.LayerNorm(96), far("layer", 1e4)) < 0.99
