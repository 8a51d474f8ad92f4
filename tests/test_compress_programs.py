"""Programs of the kinds that public reports tell of, packed and recomputed: the gradients are near.

The second step counts: of the first a gradient of a gradient is told, and not more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from patch_tools import error
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.utils import rnn

import vramx
from vramx.recompute.members import Members

SMALL = vramx.Compression(min_bytes=0)
# Half a step of 126 to the largest of a group, which is four deviations, in each of eight tensors
# that a program saves; their errors are independent.
NEAR = 4 / 126 / 2 * (8 * 2) ** 0.5

Call = Callable[..., Any]


class Program(NamedTuple):
    """A model, a step that leaves gradients, and the modules that a checkpoint recomputes."""

    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, Call], None]
    regions: Any


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, 1),
    )  # fmt: skip


def plain_step(net: nn.Module, call: Call) -> None:
    call(net, torch.randn(4, 16, 64)).square().mean().backward()


class Scan(torch.autograd.Function):
    """Reads what it saved twice, one of which no argument and no result is (mamba#1020)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        states = x.cumsum(1)
        ctx.save_for_backward(gate, states)
        return states * gate.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert len(ctx.saved_tensors) == 2
        gate, states = ctx.saved_tensors
        weight = gate.sigmoid()
        return (grad * weight).flip(1).cumsum(1).flip(1), grad * states * weight * (1 - weight)


class Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(Scan.apply(*self.up(x).chunk(2, -1)))
        return result


class Randomised(Scanned):
    """Its noise is saved before it is drawn (pytorch#193671)."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.rrelu(self.up(x)[..., :64], 0.1, 0.9, self.training))
        return result


def images() -> nn.Module:
    """Statistics, and a change in place of what they gave (pytorch#7617)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 3)
    )


def image_step(net: nn.Module, call: Call) -> None:
    call(net, torch.randn(2, 3, 16, 16)).square().mean().backward()


def penalised(net: nn.Module, call: Call) -> None:
    """A penalty on the gradient of the input, as of a Wasserstein GAN."""
    real, fake = torch.randn(16, 32), torch.randn(16, 32)
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    loss = call(net, fake).mean() - call(net, real).mean()
    (slope,) = torch.autograd.grad(call(net, mixed).sum(), mixed, create_graph=True)
    (loss + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()


def times_hessian(net: nn.Module, call: Call) -> None:
    """The product of the Hessian and a vector, as the gradient of a gradient."""
    parameters = list(net.parameters())
    loss = call(net, torch.randn(16, 32)).square().mean()
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    sum(slope.sum() for slope in slopes).backward()  # type: ignore[union-attr]


def sharpness(net: nn.Module, call: Call) -> None:
    """Two passes, with parameters that are moved in place between them (SAM)."""
    x, parameters = torch.randn(16, 32), list(net.parameters())
    call(net, x).square().mean().backward()
    moves = [0.05 * p.grad for p in parameters if p.grad is not None]
    net.zero_grad()
    with torch.no_grad():
        torch._foreach_add_(parameters, moves)
    call(net, x).square().mean().backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, moves)


def meta_learnt(net: nn.Module, call: Call) -> None:
    """Steps that are differentiated, by a model whose parameters a call is given (MAML)."""
    fast = dict(net.named_parameters())
    for _ in range(2):
        loss = call(functional_call, net, fast, (torch.randn(16, 32),)).square().mean()
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        moved = zip(fast.items(), slopes, strict=True)
        fast = {name: value - 0.1 * slope for (name, value), slope in moved}
    call(functional_call, net, fast, (torch.randn(16, 32),)).square().mean().backward()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.out = nn.LSTM(16, 32, 2, bidirectional=True), nn.Linear(64, 8)

    def forward(self, packed: rnn.PackedSequence) -> Tensor:
        result: Tensor = self.out(self.network(packed)[0].data)
        return result


def sequence_step(net: nn.Module, call: Call) -> None:
    """Sequences of different lengths, as an argument that is a tuple of tensors."""
    x = torch.randn(10, 4, 16, requires_grad=True)
    call(net, rnn.pack_padded_sequence(x * 1, [10, 7, 5, 3])).square().mean().backward()


class Masked(nn.Module):
    """Takes an object that holds a tensor (attention-gym#53)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        query, key, value = self.up(x).chunk(3, -1)
        weights = (query @ key.mT / 6).masked_fill(~mask.allowed, -1e9).softmax(-1)
        result: Tensor = self.down(weights @ value)
        return result


class Mask:
    def __init__(self) -> None:
        self.allowed = torch.ones(8, 8).tril().bool()


def masked_step(net: nn.Module, call: Call) -> None:
    x = torch.randn(2, 8, 32, requires_grad=True)
    call(net, x * 1, Mask()).square().mean().backward()


def frozen() -> nn.Module:
    """Adapters within a frozen network, whose input has no gradient (transformers#26221)."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.SiLU()))
    net.requires_grad_(False)
    return net.append(nn.Linear(64, 64))


def flow(net: nn.Module, call: Call) -> None:
    """A loss of a derivative forward and one backward (MeanFlow)."""
    x = torch.randn(16, 32)
    value, slope = call(torch.func.jvp, net, (x,), (torch.ones_like(x),))
    ((value - slope.detach()).square().mean() + slope.square().mean()).backward()


LAYERS = (nn.Linear, nn.LayerNorm)
PROGRAMS = {
    "scan": Program(Scanned, plain_step, nn.Linear),
    "randomised ReLU": Program(Randomised, plain_step, nn.Linear),
    "instance norm": Program(images, image_step, nn.Conv2d),
    "gradient penalty": Program(network, penalised, LAYERS),
    "Hessian times vector": Program(network, times_hessian, LAYERS),
    "two passes": Program(network, sharpness, LAYERS),
    "meta-learning": Program(network, meta_learnt, LAYERS),
    "sequences": Program(Sequences, sequence_step, Sequences),
    "mask": Program(Masked, masked_step, Masked),
    "frozen": Program(frozen, plain_step, nn.Sequential),
    "forward mode": Program(network, flow, LAYERS),
}


def in_context(options: vramx.Compression) -> Call:
    context = vramx.compress(options)

    def call(function: Call, *args: Any) -> Any:
        with context:
            return function(*args)

    return call


def gradients(program: Program, way: str, level: vramx.Compression) -> list[Tensor]:
    """Return the gradients of the second step."""
    torch.manual_seed(0)
    net = program.make()
    call: Call = lambda function, *args: function(*args)  # noqa: E731 - as in_context gives
    if way == "context":
        call = in_context(level)
    elif way == "packed":
        vramx.compressed_activations(net, level=level)
    elif way == "recomputed":
        vramx.checkpoint_modules(net, where=program.regions, level=level)
    for number in range(2):
        torch.manual_seed(number)
        net.zero_grad()
        program.step(net, call)
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize("way", ["packed", "context", "recomputed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_near(name: str, way: str) -> None:
    exact = gradients(PROGRAMS[name], "plain", SMALL)
    assert error(gradients(PROGRAMS[name], way, SMALL), exact) < NEAR


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_recomputed_from_exact_inputs_is_exact(name: str) -> None:
    """Noise of packing would hide a recomputation of something else."""
    keep = vramx.Compression(level="keep")
    exact = gradients(PROGRAMS[name], "plain", keep)
    assert error(gradients(PROGRAMS[name], "recomputed", keep), exact) < 1e-6


def test_a_module_is_given_back_its_own_parameters() -> None:
    net = nn.Linear(8, 8)
    own = dict(net.named_parameters())
    vramx.checkpoint_modules(net, where=nn.Linear, level="keep")
    fast = {name: 2 * value for name, value in own.items()}
    functional_call(net, fast, (torch.randn(4, 8),)).sum().backward()
    assert all(each is own[name] for name, each in net.named_parameters())
    assert vars(net)["_parameters"].keys() == own.keys()


def test_a_recomputation_with_other_parameters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "restored", lambda _: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        test_what_is_recomputed_from_exact_inputs_is_exact("meta-learning")
