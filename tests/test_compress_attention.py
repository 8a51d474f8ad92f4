"""What compress() packs of an attention: the value, and the result if it is saved; no query or key.

An error in a logit is multiplied by the exp behind it, so queries, keys, masks and the weights are
kept, whichever way the attention is computed: by a fused operation, by products, inside of a
module, or written out. The shapes are small; a test takes milliseconds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from compress_tools import input_of, recorded_packs
from policy_tools import SelfAttention
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramx.compression.hooks import compress


def test_q_and_k_are_kept_and_v_is_packed() -> None:
    q, k, v = (input_of(2, 4, 16, 8) * i for i in (1, 2, 3))
    attention = functional.scaled_dot_product_attention
    with compress(min_bytes=0) as stats:
        attention(q, k, v)
    assert stats.kept["policy"].tensors == 2
    assert stats.packed.tensors == 2  # v and the output
    with compress(min_bytes=0) as stats:
        attention(value=v, key=k, query=q)
    assert stats.kept["policy"].tensors == 2


def test_q_and_k_are_kept_where_autocast_casts_them() -> None:
    q, k, v = (input_of(2, 4, 16, 8) * i for i in (1, 2, 3))
    with torch.autocast("cpu", torch.bfloat16), compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q, k, v)
    assert stats.kept["policy"].tensors == 2


def test_q_and_k_are_kept_inside_of_multi_head_attention() -> None:
    module, x = SelfAttention(), input_of(4, 16, 64)
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
        {"dropout_p": 0.1},
        {"is_causal": True},
    ],
    ids=["plain", "bias", "mask", "dropout", "causal"],
)
@pytest.mark.parametrize("length", [24, 16], ids=["", "as long as a head is wide"])
def test_of_attention_by_products_only_the_value_is_packed(
    options: dict[str, Any], length: int, monkeypatch: Any
) -> None:
    q, k, v = input_of(2, 4, 32, 16), input_of(2, 4, length, 16) * 2, input_of(2, 4, length, 16) * 3
    if "attn_mask" in options:
        options = {"attn_mask": options["attn_mask"][:, :length]}
    with (
        sdpa_kernel(SDPBackend.MATH),
        recorded_packs(monkeypatch) as packed,
        compress(min_bytes=0) as stats,
    ):
        functional.scaled_dot_product_attention(q, k, v, **options)
    assert [p.numel() for p in packed] == [v.numel()]
    assert torch.equal(packed[0], v.detach().flatten())
    assert stats.tensors >= 5  # it has saved the weights, twice, and copies of query and key


def test_queries_and_keys_that_attention_copies_are_kept_without_a_gradient_too() -> None:
    q, k, v = (input_of(2, 4, 16, 16) * i for i in (1, 2, 3))
    with sdpa_kernel(SDPBackend.MATH), compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q.detach(), k.detach(), v)
        functional.scaled_dot_product_attention(q, k.detach(), v.detach())
    assert stats.packed.kept_bytes <= 1.02 * v.numel()  # the value, in the second call alone


def test_a_float_mask_of_attention_is_kept() -> None:
    """It holds infinities, of which a whole group would become NaN."""
    q, k, v = (input_of(2, 4, 32, 16) * i for i in (1, 2, 3))
    mask = torch.zeros(32, 32).masked_fill(torch.rand(32, 32) > 0.5, -torch.inf)
    mask.fill_diagonal_(0)
    with compress(min_bytes=0) as stats:
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert stats.packed.tensors == 2
    assert bool(torch.autograd.grad(y.sum(), q)[0].isfinite().all())


def test_weights_of_attention_that_is_written_out_are_kept_once(monkeypatch: Any) -> None:
    q, k, v = (input_of(2, 4, 32, 16) * i for i in (1, 2, 3))
    with recorded_packs(monkeypatch) as packed, compress(min_bytes=0) as stats:
        (q @ k.mT).softmax(-1) @ v
    assert stats.kept["policy"].kept_bytes == 2 * 4 * 32 * 32 * 4
    assert stats.kept["held"].tensors == 1
    assert sorted(p.numel() for p in packed) == [q.numel()] * 3


def test_the_logsumexp_of_attention_is_kept() -> None:
    q, k, v = (input_of(2, 4, 16, 64) * i for i in (1, 2, 3))
    with compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q, k, v)
    assert stats.kept["statistic"].tensors == 1
    assert stats.kept["statistic"].kept_bytes == 2 * 4 * 16 * 4
