"""Programs after public reports have the gradients that they have without packing.

Packed by a context, and recomputed from packed inputs. The rule is the fuzz's (fuzz/compare.py): a
cosine of 0.99, or three times the error of bfloat16. Each kind that has been wrong is here with the
decision that makes it right, without which it must be wrong again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import report_layers  # noqa: F401 - adds its programs
import report_models  # noqa: F401
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from report_programs import PROGRAMS, Forward, linear
from torch import Tensor, nn

import vramx
from tests.fuzz import pieces
from tests.fuzz.compare import FaultError, check
from tests.fuzz.directed import setting
from vramx.compression import graph
from vramx.compression.codec import normalised
from vramx.compression.config import Compression
from vramx.compression.policy import exactness, graph_policy, plans, policy
from vramx.compression.policy.calls import Operation
from vramx.compression.policy.policy import SavePolicy
from vramx.recompute import region

WAYS = {"packed": "context", "recomputed": "none"}
# torch's own checkpoint refuses a region that makes a jagged tensor: each time its length is new.
ONLY_PACKED = {"jagged"}


pytestmark = pytest.mark.usefixtures("one_thread")


def program_of(modules: tuple[Callable[[], Any], ...], forward: Forward, way: str) -> Any:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, make in enumerate(modules):
                setattr(self, chr(ord("a") + number), make())

        def forward(self, h: Tensor) -> Tensor:
            return forward(self, h)

    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.region = nn.Linear(64, 64), Region()

        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            packed = way == "packed"
            return self.region(h) if packed else pieces.api.checkpoint(self.region, h)

    return Program


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_without_packing(name: str, way: str) -> None:
    if way == "recomputed" and name in ONLY_PACKED:
        pytest.skip("torch's checkpoint refuses it")
    check(program_of(*PROGRAMS[name], way), setting(style=WAYS[way]))


# Kinds that have been wrong.


class Kind(NamedTuple):
    """A program that was wrong, how it is run, and the decisions without which it is so again."""

    modules: tuple[Callable[[], Any], ...]
    forward: Forward
    way: str
    decisions: list[tuple[Any, str, Any]]
    training: bool = True


class Same:
    """In place of roots: the numbers."""

    @staticmethod
    def of(elements: Tensor) -> Tensor:
        return elements

    @staticmethod
    def back(numbers: Tensor, _: torch.dtype) -> Tensor:
        return numbers


def gated(m: Any, h: Tensor) -> Tensor:
    """Of a gate only arguments near zero have a slope, and the other half multiplies it."""
    return F.glu(m.a(h) + 1_000 * torch.linspace(-1, 1, 128).to(h) ** 3)


def written_over(m: Any, h: Tensor) -> Tensor:
    """Of elu in place the result is saved: its slope is that and 1."""
    return F.elu_(m.a(h) * 100) + F.elu(m.a(h) * 300 - 100, inplace=True)


def decay(m: Any, h: Tensor) -> Tensor:
    """A scan by sums of exponents: what one exponential makes small another makes large again."""
    exponents = -F.softplus(m.a(h)).cumsum(1)
    return exponents.exp() * (h * (-exponents).exp()).cumsum(1) * 0.1


def transported(m: Any, h: Tensor) -> Tensor:
    """Sinkhorn's scalings are large where the kernel, an exponential, is small."""
    cost = 2 * (m.a(h)[..., :1] - torch.linspace(-2, 2, 16).to(h)).square()
    kernel = (-cost).exp()
    columns = 1 / (kernel.mT @ torch.ones_like(kernel[..., :1]))
    rows = 1 / (kernel @ columns)
    return rows * kernel * columns.mT * cost


def interpolated(m: Any, h: Tensor) -> Tensor:
    """The gradient of the weight is the difference of two values next to each other."""
    return torch.lerp(h, h + 0.02 * m.a(h), m.b.sigmoid())


def normalised_by_hand(m: Any, h: Tensor) -> Tensor:
    """Columns that differ by decades are made alike by a factor that does, too."""
    h = m.a(h) * torch.logspace(-3, 3, 64).to(h)
    return (h - h.mean(1, True)) * (h.var(1, keepdim=True) + 1e-9).rsqrt()


def sharp(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(30 * m.a(h))


def dead_channels(m: Any, h: Tensor) -> Tensor:
    """Every second channel has no slope, and an argument far beyond all others."""
    return F.gelu(m.a(h) - 200 * (torch.arange(64) % 2))


def evaluated(m: Any, h: Tensor) -> Tensor:
    """Running statistics are not those of columns that differ in scale."""
    uneven = h * torch.logspace(-4, 4, 64).to(h)
    return (-8 * m.a(uneven.transpose(1, 2)).square()).exp()


def of_channels(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(x.shape[1]), torch.ones(x.shape[1])


def with_other_operators(m: Any, h: Tensor) -> Tensor:
    """ctc_loss saves two tensors more in a mode that sees operators."""
    scores = m.a(h).log_softmax(-1).transpose(0, 1).float()
    labels, lengths = torch.tensor([[1, 2, 3, 3], [4, 5, 6, 7]]), torch.tensor([4, 3])
    return F.ctc_loss(scores, labels, torch.tensor([16, 14]), lengths, reduction="none")


NORM = (lambda: nn.LayerNorm(64),)
NO_ROOT = (normalised, "ROOT_OF_MOST", Same)
NO_BOUND = (plans, "bound_of", lambda _: 0)
KINDS = {
    "gated unit": Kind(
        (linear(128),), gated, "packed", [(exactness, "_PACKED", exactness._PACKED | {"glu"})]
    ),
    "elu in place": Kind(
        (linear(),), written_over, "packed", [(policy, "is_result", lambda _: False), NO_BOUND]
    ),
    "factor of an exponential": Kind(
        (linear(),), decay, "packed", [(policy, "graph_of_factor", lambda *_: (False, False))]
    ),
    "product of matrices with an exponential": Kind(
        (linear(),), transported, "packed", [(policy, "graph_of_factor", lambda *_: (False, False))]
    ),
    "factor of a reciprocal": Kind(
        (linear(),), normalised_by_hand, "packed",
        [(policy, "graph_of_factor", lambda *_: (False, False))],
    ),
    "interpolation": Kind(
        (linear(), lambda: nn.Parameter(torch.zeros(64))), interpolated, "packed",
        [(exactness, "_PACKED", exactness._PACKED | {"lerp"})],
    ),
    "sharp slope": Kind(NORM, sharp, "packed", [NO_ROOT]),
    "sharp slope, recomputed": Kind(NORM, sharp, "recomputed", [NO_ROOT]),
    "dead channels": Kind((linear(),), dead_channels, "packed", [NO_BOUND]),
    "evaluated norm": Kind(
        (lambda: nn.BatchNorm1d(64),), evaluated, "packed",
        [(normalised, "_of_channels", of_channels)], training=False,
    ),
    "operators of a mode": Kind(
        (linear(12),), with_other_operators, "recomputed",
        [(region, "Operators", lambda *_: contextlib.nullcontext())],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_right_and_is_wrong_without_the_decision(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    program = program_of(kind.modules, kind.forward, kind.way)
    how = setting(style=WAYS[kind.way], training=kind.training)
    check(program, how)
    for place, decision, wrong in kind.decisions:
        monkeypatch.setattr(place, decision, wrong)
    plans.plans_of.cache_clear()
    with pytest.raises(FaultError):
        check(program, how)


def test_a_tail_in_which_all_of_a_group_lies_is_kept() -> None:
    """Clamped to where slopes are nothing beside 1, small gradients would be others."""

    def forward(m: Any, h: Tensor) -> Tensor:
        return F.silu(m.a(h) * 2 - 24) * 1e8 + F.softplus(m.a(h) - 40) * 1e15

    check(program_of((linear(),), forward, "packed"), setting())


def test_a_divergence_by_hand_has_the_gradient_that_is_left_of_two_chances() -> None:
    """Of a teacher and of who has learnt from it; packed chances left a cosine of 0.43."""
    teacher = torch.linspace(0, 6, 4096).sin().view(64, 64)
    student = (teacher + 3e-3 * torch.randn(64, 64)).requires_grad_()
    with vramx.compress(min_bytes=0):
        chances = (teacher * 1).softmax(-1)
        loss = (chances * (chances.log() - (student * 1).log_softmax(-1))).sum()
    (found,) = torch.autograd.grad(loss, student)
    exact = student.detach().softmax(-1) - teacher.softmax(-1)
    assert F.cosine_similarity(found.flatten(), exact.flatten(), 0) > 0.999


@pytest.mark.parametrize("name", ["lstm_cell", "gru", "lstm"])
def test_what_a_kernel_of_a_recurrent_network_has_made_is_kept(name: str) -> None:
    """Gates whose slopes vanish, and all weights in one: no operation of torch made these."""
    choose = SavePolicy(Compression(min_bytes=0)).choose
    x = torch.randn(8, 64, requires_grad=True) * 1
    operation = Operation(name, (x,), {})
    assert choose(torch.randn(8, 64), operation).bits == 0
    assert choose(x, operation).bits == 8
    assert choose(x.tanh(), operation).bits == 8


# Compiled graphs, with operators of torch and with those that a compiler makes of them.

BACKENDS = ("aot_eager", "aot_eager_decomp_partition")
IN_GRAPHS: dict[str, tuple[Kind, list[tuple[Any, str, Any]]]] = {
    "gated unit": (
        KINDS["gated unit"],
        [
            (graph_policy, "_is_gate", lambda _: False),
            (graph_policy, "_HARMLESS", graph_policy._HARMLESS | {"glu_backward"}),
        ],
    ),
    "factor of an exponential": (
        KINDS["factor of an exponential"],
        [(graph, "multiplies_exponential", lambda _: False)],
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_a_graph_has_it_right_and_wrong_without_the_decision(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, decisions = IN_GRAPHS[name]

    class Program(program_of(kind.modules, kind.forward, "packed")):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            region = torch.compile(self.region, backend=backend)
            h = self.first(x)
            with pieces.api.graphs():
                return region(h)

    check(Program, setting(style="none"))
    for place, decision, wrong in decisions:
        monkeypatch.setattr(place, decision, wrong)
    plans.plans_of.cache_clear()
    with pytest.raises(FaultError):
        check(Program, setting(style="none"))
