"""Programs of others, in small: each gives under vramx.checkpoint what it gives without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checkpoint_tools import LEVELS, SMALL, check_near, plain, quiet, seeds
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx.compression import enclosing
from vramx.recompute import region
from vramx.recompute.structure import flatten

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")


@dataclasses.dataclass
class Result:
    y: Tensor
    steps: int
    others: dict[str, Any]


def until_small(x: Tensor) -> Tensor:
    """Iterate as often as the values ask for, as an equilibrium model does."""
    while x.norm() > 10:
        x = x * 0.7
    return x.sin()


def straight_through(x: Tensor) -> Tensor:
    """Quantize to a codebook, with the gradient passed on, as vector quantization does."""
    codes = torch.linspace(-2, 2, 9)
    nearest = codes[(x[..., None] - codes).square().argmin(-1)]
    return (x + (nearest - x).detach()).square()


def own_in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, ::2].mul_(2)
    y += 1
    return y.tanh_()


def in_low_precision(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ torch.ones(16, 16)
        assert y.dtype == torch.bfloat16
    return F.relu(y.float()).sin()


def quiet_statistics(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax()
    return (x / scale).tanh()


def with_inner_gradient(x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return slope * x


def with_a_fallback(x: Tensor) -> Tensor:
    """Catch every exception, that with which torch ends a recomputation too."""
    try:
        return (x.tanh() @ torch.eye(16)).sin()
    except Exception:
        return x.cos().exp() * x


def with_an_error_of_its_own(x: Tensor) -> Tensor:
    try:
        return (x.tanh() @ torch.eye(16)).sin()
    except Exception as error:
        raise ValueError("it cannot be computed") from error


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        until_small, straight_through, own_in_place, in_low_precision, quiet_statistics,
        with_inner_gradient, with_a_fallback, with_an_error_of_its_own,
    )
}  # fmt: skip
# Of those, what is smooth: its gradient has the noise of 8 bits.
CATCHING = {"with_a_fallback", "with_an_error_of_its_own"}
SMOOTH = {"own_in_place", "with_inner_gradient", *CATCHING}


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    leaf = torch.randn(32, 16, requires_grad=True)
    function(leaf * 1.0).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_its_gradient(name: str) -> None:
    if name in CATCHING and not enclosing.is_told():
        pytest.skip("torch before 2.8 does not tell its hooks, so that none can be put around them")
    expected = gradient(PROGRAMS[name])
    for _ in range(2):
        found = gradient(lambda x: vramx.checkpoint(PROGRAMS[name], x, level=SMALL))
        check_near([found], [expected], SMALL if name in SMOOTH else "keep")


def test_results_of_any_form_come_back() -> None:
    def region(x: Tensor, *, scale: float, names: tuple[str, ...]) -> Result:
        return Result(x.sin() * scale, len(names), {"rest": [x.cos(), None, names[0]]})

    def run(x: Tensor, call: Callable[..., Result]) -> Tensor:
        result = call(x, scale=2.0, names=("a", "b"))
        assert (result.steps, result.others["rest"][1:]) == (2, [None, "a"])
        return result.y + result.others["rest"][0]

    found = gradient(lambda x: run(x, partial(vramx.checkpoint, region, level=SMALL)))
    check_near([found], [gradient(lambda x: run(x, region))])


def test_an_input_that_the_region_changes_is_refused_as_in_torch() -> None:
    def region(x: Tensor) -> Tensor:
        return x.mul_(2).sin()

    for level in (SMALL, "keep"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(lambda x, c=level: vramx.checkpoint(region, x, level=c))


def test_a_layer_is_its_own_on_every_call_of_a_recurrence() -> None:
    cell = nn.Sequential(nn.Linear(16, 16), nn.Hardtanh())

    def run(x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        for _ in range(4):
            x = call(cell, x)
        return x

    found = gradient(lambda x: run(x, partial(vramx.checkpoint, level=SMALL)))
    check_near([found], [gradient(lambda x: run(x, plain))], "keep")


# What is done to a sparse matrix of neighbours ahead of its product: it has no storage to look at.
NEIGHBOURS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda neighbours: neighbours.t(),
    "weighted": lambda neighbours: neighbours * 0.5,
    "cast": lambda neighbours: neighbours.double().float(),
    "copied": lambda neighbours: neighbours.clone(),
    "negated": lambda neighbours: (-neighbours).coalesce(),
}


class Graph(nn.Module):
    """A graph network's layer."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.prepare = nn.Linear(64, 64), prepare
        self.neighbours = (torch.rand(128, 128) > 0.9).float().to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.prepare(self.neighbours), self.linear(x))


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_sparse_neighbours_are_multiplied_as_without(name: str) -> None:
    layer, x = Graph(NEIGHBOURS[name]), torch.randn(128, 64, requires_grad=True)

    def gradient(y: Tensor) -> Tensor:
        return torch.autograd.grad(y.square().sum(), x)[0]

    plain = gradient(layer(x * 1.0))
    # Its products are not known to be smooth, so that the input is kept exactly.
    assert torch.equal(gradient(vramx.checkpoint(layer, x * 1.0, level=SMALL)), plain)


class Fading(nn.Module):
    """A layer whose neighbours are a buffer; each call leaves them weaker, or takes others."""

    def __init__(self, layout: str, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(64, 64), how
        neighbours = (torch.rand(128, 128) > 0.9).float()
        sparse = neighbours.to_sparse() if layout == "coo" else neighbours.to_sparse_csr()
        if how == "a constant parameter":
            self.neighbours = nn.Parameter(sparse, requires_grad=False)
        else:
            self.register_buffer("neighbours", sparse)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "others":
            self.neighbours = self.neighbours * 0.5
        elif self.how == "weaker":
            self.neighbours.mul_(0.5)
        result: Tensor = torch.sparse.mm(self.neighbours, self.linear(x))
        return result


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls one layout a prototype
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("how", ["as they are", "others", "weaker", "a constant parameter"])
def test_sparse_buffers_are_as_the_call_found_them(how: str, layout: str) -> None:
    def after_two_steps(*, checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = Fading(layout, how)
        if checkpointed:
            vramx.checkpoint_modules(layer, lambda module: module is layer, level=SMALL)
        for _ in range(2):
            x = torch.randn(128, 64, requires_grad=True)
            layer(x).square().sum().backward()
        assert layer.linear.weight.grad is not None
        return [layer.linear.weight.grad, layer.neighbours.to_dense()]

    expected = after_two_steps(checkpointed=False)
    for found, wanted in zip(after_two_steps(checkpointed=True), expected, strict=True):
        torch.testing.assert_close(found, wanted)


class Centred(nn.Module):
    """Takes away a mean that follows its input, past the version of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(x.detach().mean(0), 0.5)
        centred: Tensor = self.linear(x - self.mean)
        return centred.sin()


class Dropping(nn.Module):
    """Runs some of its layers in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Centred() for _ in range(3))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for number in chosen:
            x = x + self.layers[number](x)
        return x


@LEVELS
def test_layers_that_are_dropped_in_the_first_step_are_seen_in_theirs(level: Any) -> None:
    def after(*, checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net, found = Dropping(), []
        if checkpointed:
            vramx.checkpoint_modules(net, lambda module: module is net, level=level)
        for chosen in ((0,), (0, 1), (1,), (0, 1, 2), (0, 2)):
            net.zero_grad()
            net(torch.randn(4, 8, requires_grad=True), chosen).square().sum().backward()
            found += [p.grad for p in net.parameters() if p.grad is not None]
        return [*found, *net.buffers()]

    check_near(after(checkpointed=True), after(checkpointed=False), level)


def test_a_layer_that_never_runs_is_watched_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []

    class Counts(region.Operators):
        def __enter__(self) -> Any:
            watched.append(self)
            return super().__enter__()

    monkeypatch.setattr(region, "Operators", Counts)
    net = Dropping()
    vramx.checkpoint_modules(net, lambda module: module is net, level="keep")
    for _ in range(12):
        net(torch.randn(4, 8, requires_grad=True), (0, 1))
    assert len(watched) < 12


# What is saved before it is filled: torch would end the recomputation there.
ENDS_UNFILLED: dict[str, Callable[[Tensor], Any]] = {
    "last": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    "before views and sums": lambda x: F.rrelu(x, 0.1, 0.9, training=True).view(-1) + x.view(-1),
    "one of two": lambda x: (x.sin(), {"y": F.rrelu(x.cos(), 0.1, 0.9, training=True)}),
    "twice": lambda x: F.rrelu(F.rrelu(x, 0.1, 0.9, True).tanh(), 0.1, 0.9, True),
}


@pytest.mark.filterwarnings("ignore")
@LEVELS
@pytest.mark.parametrize("name", ENDS_UNFILLED)
def test_noise_that_is_saved_before_it_is_drawn_is_drawn_again(name: str, level: Any) -> None:
    def gradient_of(run: Callable[[Tensor], Any]) -> Tensor:
        torch.manual_seed(0)
        leaf = torch.randn(64, 512, requires_grad=True)
        results, _ = flatten(run(leaf * 1.0))
        weights = torch.linspace(-1, 1, leaf.numel())
        sum((each.flatten() * weights).sum() for each in results).backward()
        return leaf.grad

    function = ENDS_UNFILLED[name]
    found = gradient_of(lambda x: vramx.checkpoint(function, x, level=level))
    assert torch.equal(found, gradient_of(function))


def test_noise_of_slopes_is_kept_whatever_a_policy_says() -> None:
    torch.manual_seed(0)
    leaf = torch.randn(64, 512, requires_grad=True)
    with vramx.compress(min_bytes=0, policy={"rrelu": "int8"}):
        y = F.rrelu(leaf * 1.0, 0.1, 0.9, training=True)
    slopes = torch.where(leaf < 0, y.detach() / leaf.detach(), 1.0)
    (found,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.allclose(found, slopes)


@LEVELS
def test_forward_differentiation_through_a_region_is_exact(level: Any) -> None:
    layer, x, v = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)

    def gradient(run: Callable[..., Any]) -> torch.Tensor:
        layer.zero_grad()
        with forward_ad.dual_level():
            dual = run(lambda t: layer(t).tanh(), forward_ad.make_dual(x, v))
            tangent = forward_ad.unpack_dual(dual).tangent
        tangent.square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    assert torch.equal(gradient(partial(vramx.checkpoint, level=level)), gradient(plain))


def _gated(x: Tensor, y: Tensor) -> Tensor:
    both = x + y
    return torch.tanh(both[:, :32]) * torch.sigmoid(both[:, 32:])


@LEVELS
@pytest.mark.skipif(not enclosing.is_told(), reason="torch's own checkpoint fails in TorchScript")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_new_function_of_torchscript_saves_the_same_when_it_runs_again(level: Any) -> None:
    gated, layers = torch.jit.script(_gated), [nn.Linear(32, 64) for _ in range(2)]

    def gradient(run: Callable[..., Tensor], function: Callable[..., Tensor]) -> list[Tensor]:
        x = leaf = torch.linspace(-2, 2, 8 * 32).view(8, 32).requires_grad_()
        for layer in layers:
            x = run(lambda x, layer=layer: function(layer(x), torch.zeros(8, 64)), x * 1.0)
        weights = [layer.weight for layer in layers]
        return list(torch.autograd.grad(x.square().sum(), [leaf, *weights]))

    found = gradient(partial(vramx.checkpoint, level=level), gated)
    for one, other in zip(found, gradient(plain, _gated), strict=True):
        assert torch.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.999
