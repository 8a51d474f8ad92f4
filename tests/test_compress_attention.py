"""What compress() packs of an attention: the value; no query or key, and no result.

An error in a logit is multiplied by the exp behind it. A result that is saved is computed again,
from the packed value: another would be wrong where keys have a bias or attention is sharp.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from compress_tools import input_of, packs_of, worst_cosine
from policy_tools import SelfAttention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramx.compression import attention, keeping, saved
from vramx.compression.codec import codec
from vramx.compression.config import Format
from vramx.compression.hooks import compress

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


def heads_of(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query, a key and a value that differ."""
    return input_of(*shape), input_of(*shape) * 2, input_of(*shape) * 3


def test_q_and_k_are_kept_and_v_is_packed() -> None:
    q, k, v = heads_of(2, 4, 16, 8)
    attend = functional.scaled_dot_product_attention
    with compress(min_bytes=0) as stats:
        attend(q, k, v)
    assert stats.packed.tensors == 2  # v, and the output is nothing
    assert stats.kept["statistic"].tensors == 1  # the logsumexp
    assert stats.kept["statistic"].kept_bytes == 2 * 4 * 16 * 4
    with compress(min_bytes=0) as by_name:
        attend(value=v, key=k, query=q)
    with torch.autocast("cpu", torch.bfloat16), compress(min_bytes=0) as cast:
        attend(q, k, v)
    assert [each.kept["policy"].tensors for each in (stats, by_name, cast)] == [2, 2, 2]


@pytest.mark.parametrize(("parts", "copies"), [(3, 0), (5, 3)])
def test_what_one_projection_gives_is_copied_only_where_the_rest_can_be_freed(
    parts: int, copies: int, monkeypatch: Any
) -> None:
    """A query, a key and a value that are kept are each a third of what all three hold."""
    made: list[saved.Copy] = []

    class Copy(saved.Copy):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(keeping, "Copy", Copy)
    joint = input_of(2, 8, parts * 64)
    q, k, v = joint.view(2, 8, parts, 4, 16).permute(2, 0, 3, 1, 4)[:3]
    with compress(min_bytes=0, policy={"scaled_dot_product_attention": "keep"}) as stats:
        y = functional.scaled_dot_product_attention(q, k, v)
    assert len(made) == copies
    made.clear()
    parts_and_result = 4 * q.numel() * q.element_size()
    logsumexp = q.numel() // q.shape[-1] * 4
    held = stats.kept["policy"]
    assert parts_and_result <= held.kept_bytes <= parts_and_result + logsumexp
    exact = functional.scaled_dot_product_attention(q, k, v)
    (mine,), (expected,) = (torch.autograd.grad(r.square().sum(), joint) for r in (y, exact))
    assert torch.equal(mine, expected)


def test_q_and_k_are_kept_inside_of_multi_head_attention() -> None:
    module, x = SelfAttention(bias=False), input_of(4, 16, 64)
    with compress(min_bytes=0) as stats:
        module(x)
    assert stats.operations["scaled_dot_product_attention"].tensors >= 4
    assert stats.kept["policy"].kept_bytes == 2 * x.numel() * 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": torch.randn(32, 24)},
        {"attn_mask": torch.rand(32, 24) > 0.5},
        {"is_causal": True},
    ],
    ids=["plain", "bias", "mask", "causal"],
)
@pytest.mark.parametrize("length", [24, 16], ids=["", "as long as a head is wide"])
def test_of_attention_by_products_only_the_value_is_packed(
    options: dict[str, Any], length: int, monkeypatch: Any
) -> None:
    q = input_of(2, 4, 32, 16)
    _, k, v = heads_of(2, 4, length, 16)
    if "attn_mask" in options:
        options = {"attn_mask": options["attn_mask"][:, :length]}
    with sdpa_kernel(SDPBackend.MATH):
        attend = functools.partial(functional.scaled_dot_product_attention, q, k, v, **options)
        packed, stats = packs_of(attend, monkeypatch)
    assert [p.numel() for p in packed] == [v.numel()]
    assert torch.equal(packed[0], v.detach().flatten())
    assert stats.tensors >= 5  # it has saved the weights, twice, and copies of query and key


def test_queries_and_keys_that_attention_copies_are_kept_without_a_gradient_too() -> None:
    q, k, v = heads_of(2, 4, 16, 16)
    with sdpa_kernel(SDPBackend.MATH), compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q.detach(), k.detach(), v)
        functional.scaled_dot_product_attention(q, k.detach(), v.detach())
    assert stats.packed.kept_bytes <= 1.02 * v.numel()  # the value, in the second call alone


def test_a_float_mask_of_attention_is_kept() -> None:
    """It holds infinities, of which a whole group would become NaN."""
    q, k, v = heads_of(2, 4, 32, 16)
    mask = torch.zeros(32, 32).masked_fill(torch.rand(32, 32) > 0.5, -torch.inf)
    mask.fill_diagonal_(0)
    with compress(min_bytes=0) as stats:
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert stats.packed.tensors == 2
    assert bool(torch.autograd.grad(y.sum(), q)[0].isfinite().all())


def test_weights_of_attention_that_is_written_out_are_kept_once(monkeypatch: Any) -> None:
    q, k, v = (input_of(2, 4, 32, 16) * i for i in (1, 2, 3))
    packed, stats = packs_of(lambda: (q @ k.mT).softmax(-1) @ v, monkeypatch)
    assert stats.kept["policy"].kept_bytes == 2 * 4 * 32 * 32 * 4
    assert stats.kept["held"].tensors == 1
    assert sorted(p.numel() for p in packed) == [q.numel()] * 3


class Biased(torch.nn.Module):
    """Attention of heads of 16 that adds `bias` deviations to the keys, and may turn q and k."""

    def __init__(self, bias: float, turns: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(64, 64) for _ in range(4))
        self.turns = turns
        with torch.no_grad():
            # 0.6: the deviation of what a Linear makes of standard numbers.
            self.k.bias.normal_(0, 0.6 * bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (4, 16)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        if self.turns:
            angles = torch.arange(x.shape[1])[:, None] / 100 ** (torch.arange(16) % 8 / 8)
            q, k = (
                y * angles.cos() + torch.cat((-y[..., 8:], y[..., :8]), -1) * angles.sin()
                for y in (q, k)
            )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def worst_cosine_behind_a_bias(module: torch.nn.Module, x: Tensor) -> float:
    """Return the least cosine of a weight's gradient, the mean of three draws."""
    weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    exact = torch.autograd.grad(module(x), weights, dy)
    draws = []
    for _ in range(3):
        with compress(min_bytes=0):
            y = module(x)
        draws.append(torch.autograd.grad(y, weights, dy))
    of_each = zip(exact, *draws, strict=True)
    return min(sum(worst_cosine([g], [e]) for g in found) / 3 for e, *found in of_each)


@pytest.mark.parametrize("turns", [False, True], ids=["as they are", "turned"])
def test_a_bias_of_the_keys_does_not_reach_the_gradients(turns: bool) -> None:
    torch.manual_seed(0)
    assert worst_cosine_behind_a_bias(Biased(100.0, turns), input_of(2, 32, 64)) >= 0.999


def test_a_packed_result_is_found(monkeypatch: Any) -> None:
    """A result that is off by errors of its own."""
    original_open = attention.Result.open

    def packed_result(result: attention.Result) -> Tensor:
        y = original_open(result).transpose(1, 2)
        return codec.unpack(codec.pack(y.reshape(-1), Format())).view_as(y).transpose(1, 2)

    monkeypatch.setattr(attention.Result, "open", packed_result)
    torch.manual_seed(0)
    assert worst_cosine_behind_a_bias(Biased(100.0, False), input_of(2, 32, 64)) < 0.999
    assert worst_cosine_where_sharp({}) < 0.999


SHARP = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "mask": {"attn_mask": torch.rand(32, 32).fill_diagonal_(1) > 0.3},
    "bias": {"attn_mask": torch.randn(32, 32)},
}


def worst_cosine_where_sharp(options: dict[str, Any], key_heads: int = 4) -> float:
    """Return the least cosine of gradients where next to all of a row's weight is on its key."""
    torch.manual_seed(0)
    k = 3 * torch.randn(2, key_heads, 32, 16)
    q = k.repeat_interleave(4 // key_heads, 1)
    leaves = [x.clone().requires_grad_() for x in (q, k, torch.randn(2, key_heads, 32, 16))]
    dy = torch.randn(2, 4, 32, 16)

    def gradients(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        q, k, v = (x * 1 for x in leaves)
        mask = options.get("attn_mask")
        cast = mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask
        options_now = {**options, "attn_mask": cast, "enable_gqa": key_heads != 4}
        y = functional.scaled_dot_product_attention(q, k, v, **options_now)
        return torch.autograd.grad(y, leaves, dy.to(q.dtype))

    exact = gradients([x.detach().double().requires_grad_() for x in leaves])
    with compress(min_bytes=0) as stats:
        found = gradients(leaves)
    # Before 2.11 torch has no kernel on a processor for heads that are shared.
    in_parts = key_heads != 4 and RELEASE < (2, 11)
    assert stats.packed.tensors >= (1 if in_parts else 2)
    return worst_cosine(found, exact)


@pytest.mark.parametrize(
    ("options", "key_heads"), [*((each, 4) for each in SHARP.values()), ({}, 2)]
)
def test_gradients_are_right_where_attention_is_sharp(options: Any, key_heads: int) -> None:
    assert worst_cosine_where_sharp(options, key_heads) >= 0.999


def test_with_dropout_value_and_result_are_kept() -> None:
    q, k, v = heads_of(2, 4, 16, 8)
    with compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert stats.operations["scaled_dot_product_attention"].tensors >= 3
    packed = [stats.packed.tensors, stats.packed.seen_bytes]
    assert packed in ([0, 0], [1, v.numel()])  # by products dropout has a mask, a bit each


def test_a_mask_that_was_written_to_since_is_told_of() -> None:
    q, k, v = heads_of(2, 4, 32, 16)
    mask = torch.zeros(32, 32)
    with compress(min_bytes=0):
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    mask.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def gradient_of_layer(width: int, *, packed: bool) -> torch.Tensor:
    """Return that of the projections where one sample of two is 300 times the other."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(width, 4, batch_first=True)
    x = torch.randn(2, 16, width) * torch.tensor([1.0, 300.0])[:, None, None]
    x = x.requires_grad_() * 1.0
    with compress("int8" if packed else "keep", min_bytes=0):
        y, _ = module(x, x, x, need_weights=False)
    # As a norm of each place has them.
    (y / y.detach().norm(dim=-1, keepdim=True) * torch.randn_like(y)).sum().backward()
    return module.in_proj_weight.grad


@pytest.mark.parametrize("width", [24, 64, 192])
def test_a_small_sample_beside_a_large_one_has_its_gradient(width: int) -> None:
    found, exact = (gradient_of_layer(width, packed=packed) for packed in (True, False))
    assert worst_cosine([found], [exact]) > 0.999


def test_samples_that_share_a_scale_are_found(monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "token_length", lambda *_: None)
    found, exact = (gradient_of_layer(64, packed=packed) for packed in (True, False))
    assert worst_cosine([found], [exact]) < 0.99
