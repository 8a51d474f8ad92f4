"""Attention with the projection behind it: results, gradients, bytes, masks, errors.

Backward computes the result again from decoded values: the projection's gradients are those of that
very result, which rounding to the nearest lets a test compute as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from norm_tools import EXACT, NEAREST, error, held_bytes, sample
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramx.compression import enclosing
from vramx.compression.codec.codec import layout_of, pack, unpack
from vramx.compression.config import Format
from vramx.nn.attention import attention_linear
from vramx.nn.dropout import dropout
from vramx.nn.readers import Behind
from vramx.nn.sides import Side

BATCH, HEADS, KEY_HEADS, TOKENS, SIZE, OUTPUTS, RANK = 2, 8, 2, 6, 16, 5, 3
WIDTH = HEADS * SIZE
# float32: sums of some hundred terms, added in another order; ten times what is seen.
ROUNDING = 64 * torch.finfo(torch.float32).eps


def heads(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        sample(BATCH, TOKENS, count, SIZE, seed=i, dtype=dtype)
        .detach().transpose(1, 2).requires_grad_()
        for i, count in enumerate((HEADS, KEY_HEADS, KEY_HEADS))
    )  # fmt: skip
    return q, k, v


def readers(kind: str, p: float = 0.0, dtype: torch.dtype = torch.float32) -> Behind:
    """Return a projection that learns, a frozen one with an adapter, or an adapter alone."""
    weight, bias = sample(OUTPUTS, WIDTH, seed=6, dtype=dtype), sample(OUTPUTS, seed=7, dtype=dtype)
    side = Side(sample(RANK, WIDTH, seed=8, dtype=dtype), p)
    return {
        "learning": Behind(weight, bias),
        "frozen": Behind(weight.detach(), None, None, side),
        "both": Behind(weight, bias, None, side),
        "side": Behind(side=side),
        "nobody": Behind(),
    }[kind]


def leaves(behind: Behind) -> list[Tensor]:
    given = (behind.weight, behind.bias, None if behind.side is None else behind.side.weight)
    return [each for each in given if each is not None and each.requires_grad]


def plain(tensors: tuple[Tensor, ...], behind: Behind, **call: Any) -> list[Tensor]:
    q, k, v = tensors
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    y = functional.scaled_dot_product_attention(q, k, v, **call).transpose(1, 2).flatten(2)
    weight, bias, _, side = behind
    made = [y if weight is None else functional.linear(y, weight, bias)]
    return made if side is None else [*made, functional.linear(dropout(y, side.p), side.weight)]


def fused(tensors: tuple[Tensor, ...], behind: Behind, keep: Any = NEAREST, **call: Any) -> Any:
    q, k, v = tensors
    found = attention_linear((q, k, v), behind, enable_gqa=True, keep=keep, **call)
    return [each for each in found if each is not None]


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = [sample(*y.shape, seed=20 + i).detach().to(y.dtype) for i, y in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, weights)


def decoded(v: Tensor) -> Tensor:
    rows = v.detach().transpose(1, 2).contiguous()
    return unpack(pack(rows.flatten(), Format(rounding="nearest"))).view_as(rows).transpose(1, 2)


def near(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float = ROUNDING) -> bool:
    return all(error(a.detach(), b.detach()) < bound for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["learning", "frozen", "both", "side", "nobody"])
def test_projections_are_computed_and_learn_from_the_result_of_decoded_values(
    kind: str, p: float
) -> None:
    tensors, behind = heads(), readers(kind, p)
    torch.manual_seed(3)
    ours = fused(tensors, behind, is_causal=True)
    torch.manual_seed(3)
    theirs = plain(tensors, behind, is_causal=True)
    assert near(ours, theirs)
    q, k, v = tensors
    torch.manual_seed(3)
    again = plain((q, k, decoded(v).requires_grad_()), behind, is_causal=True)
    every = [q, k, *leaves(behind)]
    assert near(gradients(ours, every), gradients(again, every))


@pytest.mark.parametrize("kind", ["learning", "frozen", "side"])
def test_gradient_of_values_is_torchs(kind: str) -> None:
    tensors, behind = heads(), readers(kind)
    found, expected = (gradients(f(tensors, behind), [tensors[2]]) for f in (fused, plain))
    assert near(found, expected)


@pytest.mark.parametrize("index", [0, 1])
def test_one_of_two_results_may_be_used_alone(index: int) -> None:
    tensors, behind = heads(), readers("both")
    found, expected = (
        torch.autograd.grad(f(tensors, behind)[index].sum(), tensors[2:]) for f in (fused, plain)
    )
    assert near(found, expected)


@pytest.mark.skipif(not enclosing.is_told(), reason="torch names no innermost hooks: it is packed")
def test_values_that_are_made_again_are_not_kept() -> None:
    q, k, v = heads()
    exact, behind, calls = v.detach().clone(), readers("both"), list[int]()

    def make() -> Tensor:
        calls.append(1)
        return exact

    made = attention_linear((q, k, v), behind, enable_gqa=True, values=make)
    with torch.no_grad():
        v.zero_()  # which torch would name if v were kept
    every = [q, k, *leaves(behind)]
    found = gradients([each for each in made if each is not None], every)
    assert near(found, gradients(plain((q, k, exact), behind), every))
    assert len(calls) == 1


def test_values_are_packed_under_hooks_of_others_and_after_dropout() -> None:
    q, k, v = heads()
    calls: list[int] = []

    def make() -> Tensor:
        calls.append(1)
        return v.detach()

    with torch.autograd.graph.save_on_cpu():
        hooked, _ = attention_linear((q, k, v), readers("learning"), enable_gqa=True, values=make)
    dropped, _ = attention_linear(
        (q, k, v), readers("learning"), dropout_p=0.2, enable_gqa=True, values=make
    )
    (hooked + dropped).sum().backward()
    assert not calls


@pytest.mark.parametrize("case", ["dropout", "keep", "no gradients"])
def test_what_no_kernel_takes_is_torchs(case: str) -> None:
    tensors, behind = heads(), readers("both")
    if case == "no gradients":
        tensors = tuple(x.detach() for x in tensors)  # type: ignore[assignment]
    call = {"dropout_p": 0.3} if case == "dropout" else {}
    torch.manual_seed(4)
    ours = fused(tensors, behind, EXACT if case == "keep" else NEAREST, **call)
    torch.manual_seed(4)
    theirs = plain(tensors, behind, **call)
    assert near(ours, theirs)
    learning = leaves(behind)
    assert near(gradients(ours, learning), gradients(theirs, learning))


def test_autocast_casts_in_the_operator_and_keeps_no_cast() -> None:
    tensors, behind = heads(), readers("both")
    with torch.autocast("cpu", torch.bfloat16):
        y, h = fused(tensors, behind)
        held = held_bytes(lambda: fused(tensors, behind), *tensors, *leaves(behind))
    assert y.dtype == h.dtype == torch.bfloat16
    found = gradients([y, h], leaves(behind))
    assert all(g.dtype == torch.float32 for g in found)
    # Casts of q, k and v, a pack, two probes, and the side's cast, which is autograd's.
    casts = 2 * (tensors[0].numel() + tensors[1].numel() + RANK * WIDTH)
    assert held <= casts + layout_of(tensors[2].numel(), Format()).buffer_bytes + 16


def test_a_side_of_another_type_is_computed_in_it() -> None:
    tensors, behind = heads(torch.bfloat16), readers("frozen", dtype=torch.bfloat16)
    assert behind.side is not None
    wide = behind.side.weight.detach().float().requires_grad_()
    y, h = fused(tensors, behind._replace(side=Side(wide)))
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    (alone,) = torch.autograd.grad(h.sum(), [tensors[2]], retain_graph=True)
    found = gradients([y, h], [wide, tensors[2]])
    assert [alone.dtype, *(g.dtype for g in found)] == [
        torch.bfloat16, torch.float32, torch.bfloat16
    ]  # fmt: skip


def test_second_derivatives_reach_every_input() -> None:
    tensors, behind = heads(), readers("both", 0.3)
    every = [*tensors, *leaves(behind)]

    def second(function: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        squares = [(y**2).sum() for y in function(tensors, behind)]
        first = torch.autograd.grad(squares, every, create_graph=True)
        return torch.autograd.grad([(g**2).sum() for g in first], every)

    with sdpa_kernel(SDPBackend.MATH):
        expected = second(plain)
    # Values are off by 0.4 % of the largest of a group, about 3 deviations.
    assert near(second(fused), expected, 0.1)


@pytest.mark.parametrize("kind", ["learning", "frozen", "side", "nobody"])
def test_compiles_to_one_graph(kind: str) -> None:
    tensors, behind = heads(), readers(kind)
    compiled = torch.compile(
        lambda q, k, v: fused((q, k, v), behind), backend="aot_eager", fullgraph=True
    )
    every = [*tensors, *leaves(behind)]
    assert near(gradients(compiled(*tensors), every), gradients(fused(tensors, behind), every))


def test_operators_say_what_they_return() -> None:
    call, form, left = (3, 0.0, False, None), [8, 128, 1, 0, 0], [-1, 0, 0, 0, 0]
    q, k, v = heads()
    for kind in ("learning", "both", "side"):
        weight, bias, _, side = readers(kind)
        fields = (weight, bias, None if side is None else side.weight, None, 1 << 16)
        torch.library.opcheck(
            torch.ops.vramx.attention.default, (q, k, v, None, *fields, *call, form, left),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip
