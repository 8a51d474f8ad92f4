"""Attention with its projections, some heads at a time: torch's results, torch's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramx.nn import attention_groups, attention_kernels
from vramx.nn.attention_groups import Heads, attention_in_groups

TOKENS, WIDTH, SIZE = 24, 20, 8


def turned(q: Tensor, k: Tensor) -> Sequence[Tensor]:
    angles = torch.arange(q.shape[2], dtype=q.dtype).view(-1, 1)
    return q * angles.cos() + q.roll(4, -1) * angles.sin(), k * angles.cos()


def scaled(q: Tensor, k: Tensor, first: Tensor, second: Tensor) -> Sequence[Tensor]:
    return F.rms_norm(q, (SIZE,), first), F.rms_norm(k, (SIZE,), second)


class Case:
    """An input, four projections, and what lies between heads and attention."""

    def __init__(
        self, queries: int, keys: int, *, bias: bool = False, learned: bool = False, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        outputs = (queries * SIZE, keys * SIZE, keys * SIZE)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, n, bias=bias) for n in outputs).double()
        self.layers.append(nn.Linear(outputs[0], 12, bias=bias).double())
        self.learned = [nn.Parameter(torch.rand(SIZE).double() + 0.5) for _ in range(2 * learned)]
        self.x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
        self.heads = Heads(SIZE, scaled if learned else turned, tuple(self.learned))

    @property
    def inputs(self) -> list[Tensor]:
        return [self.x, *self.layers.parameters(), *self.learned]

    def by_torch(self, mask: Tensor | None = None, causal: bool = True) -> Tensor:
        *made, outer = self.layers
        q, k, v = (f(self.x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in made)
        q, k = self.heads.between(q, k, *self.learned)
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=True)
        return outer(y.transpose(1, 2).flatten(2))

    def in_groups(self, mask: Tensor | None = None, causal: bool = True) -> Tensor:
        call = attention_kernels.Call(attention_kernels.NO_KERNEL, 0.0, causal, None)
        terms = [(each.weight, each.bias) for each in self.layers]
        y = attention_in_groups(self.x, terms, self.heads, mask, call)
        assert y is not None
        return y

    def gradients(self, y: Tensor, **how: Any) -> tuple[Tensor, ...]:
        wanted = [each for each in self.inputs if each.requires_grad]
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        return torch.autograd.grad((y * weight).sum(), wanted, **how)


CASES = {
    "as many keys": {"queries": 4, "keys": 4},
    "shared keys": {"queries": 6, "keys": 2},
    "one key": {"queries": 3, "keys": 1},
    "more keys than groups": {"queries": 10, "keys": 10},
    "biases": {"queries": 4, "keys": 2, "bias": True},
    "norms of heads": {"queries": 4, "keys": 2, "learned": True},
}


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_results_and_gradients_are_torchs(how: dict[str, Any], masked: bool) -> None:
    case = Case(**how)
    mask = torch.rand(2, 1, TOKENS, TOKENS) < 0.7 if masked else None
    if mask is not None:
        mask[..., 0] = True
    exact, found = case.by_torch(mask, mask is None), case.in_groups(mask, mask is None)
    torch.testing.assert_close(found, exact)
    for one, other in zip(case.gradients(found), case.gradients(exact), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("frozen", ["x", "layers", "learned", "first", "bias"])
def test_what_is_frozen_has_no_gradient_and_the_others_have_theirs(frozen: str) -> None:
    case = Case(4, 2, bias=True, learned=True)
    still = {
        "x": [case.x],
        "layers": list(case.layers.parameters()),
        "learned": case.learned,
        "first": [case.layers[0].weight, case.learned[1]],
        "bias": [case.layers[1].bias, case.layers[3].bias],
    }
    for each in still[frozen]:
        each.requires_grad_(False)
    exact = case.gradients(case.by_torch())
    for one, other in zip(case.gradients(case.in_groups()), exact, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bias", [False, True])
def test_the_result_may_be_written_into(bias: bool) -> None:
    case = Case(4, 2, bias=bias)
    exact = case.gradients(case.by_torch() + 1)
    for one, other in zip(case.gradients(case.in_groups().add_(1)), exact, strict=True):
        torch.testing.assert_close(one, other)


def test_heads_go_through_in_groups_of_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = attention_kernels.forward

    def watched(call: Any, tensors: Any, mask: Any) -> Any:
        seen.append([each.shape[1] for each in tensors])
        return forward(call, tensors, mask)

    monkeypatch.setattr(attention_groups.kernels, "forward", watched)
    case = Case(6, 2)
    y = case.in_groups()
    assert seen == [[3, 1, 1], [3, 1, 1]]
    case.gradients(y)
    assert len(seen) == 2, "attention is not computed again"


def test_second_derivatives_are_torchs() -> None:
    case = Case(4, 2, bias=True, learned=True)
    found = []
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivatives
        exact = case.by_torch()
    for y in (case.in_groups(), exact):
        first = case.gradients(y, create_graph=True)
        total = sum(each.square().sum() for each in first)
        found.append(torch.autograd.grad(total, case.inputs, allow_unused=True))
    for one, other in zip(*found, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other)


def test_autocast_computes_in_its_type_and_weights_keep_theirs() -> None:
    case = Case(4, 2, bias=True)
    case.layers.float()
    case.x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        exact, found = case.by_torch(), case.in_groups()
    assert found.dtype == exact.dtype == torch.bfloat16
    near = {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, exact, **near)
    for one, other in zip(case.gradients(found), case.gradients(exact), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **near)


@pytest.mark.parametrize("why", ["dropout", "a mask for each head", "two dimensions"])
def test_what_cannot_be_divided_is_left(why: str) -> None:
    case, mask = Case(4, 2), None
    x = case.x[0] if why == "two dimensions" else case.x
    if why == "a mask for each head":
        mask = torch.ones(2, 4, TOKENS, TOKENS, dtype=torch.bool)
    p = 0.1 if why == "dropout" else 0.0
    call = attention_kernels.Call(attention_kernels.NO_KERNEL, p, False, None)
    terms = [(each.weight, each.bias) for each in case.layers]
    assert attention_in_groups(x, terms, case.heads, mask, call) is None
