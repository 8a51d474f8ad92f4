"""What is decided once for tensors that are alike is what would be decided for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.fuzz.search import search
from vramx import compress, compressed_activations, compression_stats
from vramx.compression import sharing
from vramx.compression.policy import looks, plans
from vramx.compression.policy.calls import Operation
from vramx.compression.policy.plans import Plan, Planner
from vramx.compression.saved import Pending

pytestmark = [
    pytest.mark.skipif(looks._call_key is None, reason="the core is not compiled"),
    pytest.mark.usefixtures("one_thread"),
]


def facts_of(plan: Plan) -> dict[str, Any]:
    """Return all that a plan says, mappings by what they pack."""
    facts = {name: getattr(plan, name, None) for name in Plan.__slots__}
    mapping = facts.pop("mapping")
    return facts | {"function": None if mapping is None else mapping.function}


@pytest.fixture
def found_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compare each plan with one that is made anew; give the names of the operations."""
    names: list[str] = []
    original = Planner.plan

    def compared(self: Planner, tensor: Tensor, operation: Operation) -> Plan | None:
        found = original(self, tensor, operation)
        if found is not None:
            made = self._plans.make(tensor, operation, self._rules.choose(tensor, operation))
            facts = facts_of(found)
            if not found.bits:  # whether a weight is one by its looks or by where it lies
                facts = {"bits": 0, "reason": found.reason}
            assert facts.items() <= facts_of(made).items(), f"{operation.name}: {tensor.shape}"
        names.append(operation.name)
        return found

    monkeypatch.setattr(Planner, "plan", compared)
    return names


@pytest.mark.slow
def test_random_programs_find_the_plans_that_they_would_make(found_again: list[str]) -> None:
    found = search(60, 5)

    assert not found.fault, found
    assert len(set(found_again)) >= 10


X = torch.randn(8, 64)
WEIGHT = nn.Parameter(torch.randn(64, 64))
# Two calls that look much alike and are decided differently, in this order and the other.
PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "an exponent": (lambda x: x.pow(2), lambda x: x.pow(3.5)),
    "an option": (functional.elu, lambda x: functional.elu(x, 2.0)),
    "an option by name": (functional.elu, lambda x: functional.elu(x, alpha=2.0)),
    "a power of a power": (lambda x: (x + 1).square(), lambda x: (x.square() + 1).square()),
    "both factors": (lambda x: x * x, lambda x: x * (x + 1)),
    "an exponential": (lambda x: x * (2 * x.sin()), lambda x: x * (2 * x.exp())),
    "a logarithm": (lambda x: x * (1 - x.sin()), lambda x: x * (1 - x.log_softmax(-1))),
    "a logarithm itself": (lambda x: x.exp() * (x + 1), lambda x: x.log() * (x + 1)),
    "scores less their logsumexp": (
        lambda x: (x - x.mean(1, True)) * 2 * x,
        lambda x: (x - x.logsumexp(1, True)) * 2 * x,
    ),
    "a product with an exponential": (lambda x: x @ (2 * x.sin()).T, lambda x: x @ (2 * x.exp()).T),
    "a reciprocal": (lambda x: x * (1 / x.mean(1, True)), lambda x: x * (1 / x.mean(0))),
    "a parameter's view": (lambda x: x @ (x.T + 1), lambda x: x @ WEIGHT[:, :8]),
    "a parameter's cast": (
        lambda x: x.bfloat16() @ (x.T @ x).bfloat16(),
        lambda x: x.bfloat16() @ WEIGHT.bfloat16(),
    ),
    "a larger argument": (lambda x: x * (x + 1)[:1, :1], lambda x: x[:1, :1] * (x[:1, :1] + 1)),
    "a position": (
        lambda x: functional.linear(x, (x.T @ x)),
        lambda x: functional.linear((x.T @ x), (x.T @ x)),
    ),
    "dropout": (lambda x: attention(x, dropout_p=0.0), lambda x: attention(x, dropout_p=0.5)),
    "a leaf": (lambda x: (x + 1).tanh().mm(WEIGHT), lambda x: X.mm(WEIGHT)),
}


def attention(x: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.view(1, 8, 4, 16).transpose(1, 2) * factor for factor in (1, 2, 3))
    return functional.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_calls_that_differ_have_plans_of_their_own(
    name: str, backwards: bool, found_again: list[str]
) -> None:
    calls = PAIRS[name][::-1] if backwards else PAIRS[name]
    for call in (*calls, *calls):
        x = torch.randn(8, 64, requires_grad=True) * 1
        with compress(min_bytes=16):
            call(x).sum().backward()
    assert found_again


@pytest.mark.parametrize(
    ("name", "part"), [("an option", "_call_key"), ("a power of a power", "graph_of_factor")]
)
def test_a_key_that_leaves_something_out_is_found(
    name: str, part: str, found_again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, part, lambda name, *_: name if isinstance(name, str) else None)
    with pytest.raises(AssertionError, match=r"elu|pow|square"):
        test_calls_that_differ_have_plans_of_their_own(name, False, found_again)


def test_without_the_core_all_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts() -> Any:
        with compress(min_bytes=0) as stats:
            for calls in PAIRS.values():
                for call in calls:
                    call(torch.randn(8, 64, requires_grad=True) * 1).sum().backward()
        return stats

    expected = counts()
    monkeypatch.setattr(looks, "_call_key", None)
    plans.plans_of.cache_clear()
    assert counts() == expected
    made = plans.plans_of(compress(min_bytes=0).options)
    assert list(made.of_calls) == [None]


def test_a_decision_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    original = plans.Plans.make

    def make(self: plans.Plans, tensor: Tensor, operation: Operation, choice: Any) -> Plan:
        made.append(operation.name)
        return original(self, tensor, operation, choice)

    monkeypatch.setattr(plans.Plans, "make", make)
    for _ in range(3):
        x = torch.randn(8, 64, requires_grad=True) * 1
        with compress(min_bytes=0):
            functional.gelu(functional.linear(x, WEIGHT).tanh() * x)
    # Both factors of the product; the input of linear, its weight is a parameter.
    assert sorted(made) == ["gelu", "linear", "linear", "mul", "mul", "tanh"]


def test_memory_of_a_module_is_told_from_other_memory() -> None:
    """A buffer looks like any tensor that has no gradient; where it lies is asked each time."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(8, 64))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x * (scale + 0) + x * self.scale

    module = compressed_activations(Scaled(), min_bytes=0)
    for _ in range(2):
        module((torch.randn(8, 64, requires_grad=True) * 1), torch.randn(8, 64))
    kept = compression_stats(module).kept
    assert kept["parameter"].tensors == 2


def test_memory_of_a_module_that_was_written_to_is_the_modules() -> None:
    module = compressed_activations(Scaling(), min_bytes=0)
    for _ in range(2):
        module(torch.randn(8, 64, requires_grad=True) * 1)
    assert compression_stats(module).kept["parameter"].tensors == 2


class Scaling(nn.Module):
    """Writes over its own memory, and multiplies by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(8, 64))

    def forward(self, x: Tensor) -> Tensor:
        self.state.detach_()
        return self.state.add_(x) @ (x.T + 1)


def test_entries_of_what_is_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_MOST_DEAD", 4)
    table, storage = sharing.Table(), torch.zeros(4).untyped_storage()
    kept = [Pending(torch.zeros(1)) for _ in range(3)]
    for number, each in enumerate(kept):
        table.add(number, storage, each)
    for number in range(100):
        table.add(100 + number, storage, Pending(torch.zeros(1)))
    assert len(table._entries) < 20
    assert [table.find(number, storage) for number in range(3)] == kept
    assert table.find(0, torch.zeros(4).untyped_storage()) is None


def test_sizes_that_never_return_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_CALLS", 8)
    made = plans.plans_of(compress(min_bytes=0).options)
    for length in range(1, 50):
        x = torch.randn(length, 4, requires_grad=True) * 1
        with compress(min_bytes=0):
            x.tanh()
    assert len(made.of_calls) <= 9
