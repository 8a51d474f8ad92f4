"""compress(): memory that is kept once, decoded once, and held no longer than it is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from compress_tools import (
    Attention,
    check_that_nothing_is_left,
    held_bytes,
    input_of,
    packs_of,
    recorded_packs,
)
from torch import nn

from vramx.compression import keeping, session
from vramx.compression.hooks import compress
from vramx.compression.policy.operations import OperationMode


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    check_that_nothing_is_left()


# What is kept already


def test_three_projections_share_one_packed_input(monkeypatch: Any) -> None:
    attention, x = Attention(), input_of(4, 16, 64)
    packed, _ = packs_of(lambda: attention(x), monkeypatch)
    assert sum(torch.equal(p, x.detach().flatten()) for p in packed) == 1


def test_permutations_of_one_range_share_it(monkeypatch: Any) -> None:
    x = input_of(8, 16)
    with recorded_packs(monkeypatch) as packed, compress(min_bytes=0, rounding="nearest"):
        y = (x.t() @ x).sum()
    assert len(packed) == 1
    (found,) = torch.autograd.grad(y, x)
    # d/dx sum(x' x) = 2 x 1 1', from values within half a step of x: 16 of them a row.
    expected = 2 * x.detach().sum(1, keepdim=True).expand_as(x)
    step = float(x.detach().abs().max()) * 1.0079 / 127
    assert float((found - expected).abs().max()) <= 2 * 16 * step / 2 * 1.001


@pytest.mark.parametrize("bounded", [torch.tanh, torch.sigmoid])
def test_an_activation_of_bounded_results_shares_what_is_packed_of_them(
    monkeypatch: Any, bounded: Any
) -> None:
    packed, _ = packs_of(lambda: functional.gelu(bounded(input_of(8, 64))), monkeypatch)
    assert len(packed) == 1


def memory_used_again() -> bool:
    """Save a tensor, free it, save another at the same address; say if the gradients are right."""
    weight = torch.ones(32, 32, requires_grad=True)
    memory = np.ones(32 * 32, dtype=np.float32)
    products = []
    with pytest.MonkeyPatch.context() as patch, compress(min_bytes=0, rounding="nearest"):
        # As data of the program's own it would be kept, and changed with its memory.
        patch.setattr(OperationMode, "is_given", lambda *_: False)
        for value in (1, 5):
            memory.fill(value)
            x = torch.from_numpy(memory).view(32, 32)
            assert x._version == 0
            products.append((x @ weight).mean(0).sum())
            del x
    (found,) = torch.autograd.grad(products[0] + products[1], weight)
    # 1 and 5 are within half a step of what is decoded; mistaken for each other, 4 off.
    return abs(float(found.mean()) - 6) < 0.1


def test_memory_that_was_freed_and_used_again_is_not_taken_for_kept(monkeypatch: Any) -> None:
    assert memory_used_again()

    # The defect: a table by address.
    def by_address(tensor: torch.Tensor, *_: Any) -> Any:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version

    def find(self: session.Table, key: Any, _: Any) -> Any:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]()

    monkeypatch.setattr(session, "range_key", by_address)
    monkeypatch.setattr(session.Table, "find", find)
    assert not memory_used_again()


def test_the_object_of_a_storage_lives_as_long_as_its_memory() -> None:
    """What a Table relies on to know memory again; torch keeps the object alive."""
    x = input_of(64)
    storage = weakref.ref(x.untyped_storage())
    kept = x.view(8, 8).sin()  # whose graph has the memory
    other = x.detach()
    del x
    gc.collect()
    assert storage() is other.untyped_storage()
    del other, kept
    assert storage() is None


def changed_between_saves(cast: bool) -> bool:
    """Save a tensor, change it in place, save it again; say if both gradients are right."""
    one, two = (nn.Linear(64, 64, bias=False) for _ in range(2))
    x = input_of(8, 64)
    before = x.detach().clone()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast), compress(min_bytes=0):
        first = one(x)
        with torch.no_grad():
            x.mul_(-3)  # the same history, other data
        second = two(x)
    (first.float().sum() + second.float().sum()).backward()
    scale = float(before.abs().sum())
    error = (one.weight.grad - before.sum(0)).abs().sum() / scale
    error += (two.weight.grad - -3 * before.sum(0)).abs().sum() / scale
    return float(error) < 1  # mistaken for each other: 4 * sum |sum x| / sum |x|, over 64 rows


@pytest.mark.parametrize("cast", [False, True])
def test_a_change_in_place_makes_it_other_data(cast: bool, monkeypatch: Any) -> None:
    assert changed_between_saves(cast)
    original = session.range_key

    def without_version(tensor: torch.Tensor, *others: Any) -> Any:
        key = original(tensor, *others)
        return (*key[:5], *key[6:])  # type: ignore[index]

    monkeypatch.setattr(session, "range_key", without_version)
    assert not changed_between_saves(cast)


def test_the_casts_of_autocast_share_one_packed_input(monkeypatch: Any) -> None:
    attention, x = Attention(), input_of(4, 16, 64)
    with torch.autocast("cpu", torch.bfloat16):
        packed, stats = packs_of(lambda: attention(x), monkeypatch)
    cast = x.detach().bfloat16().flatten()
    assert sum(torch.equal(p, cast) for p in packed) == 1
    # Without sharing torch keeps three casts, of 2 bytes an element; and what the projection reads.
    assert stats.operations["linear"].seen_bytes == (3 + 1) * 2 * x.numel()


def test_casts_of_different_outputs_of_one_node_are_not_shared(monkeypatch: Any) -> None:
    a, b = input_of(8, 128).chunk(2, dim=1)
    layer = nn.Linear(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        packed, _ = packs_of(lambda: (layer(a), layer(b)), monkeypatch)
    assert len(packed) == 2


def test_contexts_that_follow_each_other_share(monkeypatch: Any) -> None:
    # The output of a tanh is saved by it, and by the next layer in a context of its own.
    layer, x = nn.Linear(64, 64), input_of(8, 64)
    with recorded_packs(monkeypatch) as packed:
        with compress(min_bytes=0):
            y = x.tanh()
        with compress(min_bytes=0):
            z = layer(y)
    assert len(packed) == 1
    del z


# What is held


def fused_projection_bytes() -> float:
    """Return the bytes that fused q, k (kept) and v (packed) take, over those of the storage."""
    x = input_of(4, 256, 3 * 64)
    x.sum()
    weight = torch.nn.Parameter(torch.eye(3 * 64))

    def forward() -> torch.Tensor:
        with compress(min_bytes=1024, policy={"matmul": "keep"}):
            q, k, v = (x @ weight).view(4, 256, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind()
            return functional.scaled_dot_product_attention(q, k, v)

    taken, y = held_bytes(forward)
    return (taken - y.numel() * 4) / (x.numel() * 4)


def test_kept_views_do_not_hold_the_storage_of_what_is_packed(monkeypatch: Any) -> None:
    # 2/3 of the storage as copies, 1/3 at 8.25 bits an element of 32, the packed output as much,
    # and the logsumexp, 1/16 of q.
    bound = 2 / 3 + 2 / 3 * 0.27 + 1 / 48 + 0.01
    assert fused_projection_bytes() < bound
    monkeypatch.setattr(keeping, "_MOST", 0.0)
    assert fused_projection_bytes() >= bound


def test_what_is_held_by_reference_is_not_packed_beside_it() -> None:
    # The result of softmax is kept; the product that follows would pack it for nothing.
    x, v = input_of(64, 64), input_of(64, 16)
    with compress(min_bytes=0) as stats:
        y = torch.softmax(x, -1) @ v
    assert stats.kept["held"].tensors == 1
    assert stats.operations["softmax"].kept_bytes == x.numel() * 4
    del y


def test_what_is_kept_stands_for_what_was_packed_of_it_before() -> None:
    # As the states of a scan: a product packs each, and then the next step keeps it.
    layer, x = nn.Linear(64, 64, bias=False), torch.rand(256, 64, requires_grad=True) + 1
    with compress(min_bytes=0) as stats:
        y = layer(x).sum() + x.log().sum()
    assert stats.kept_bytes == stats.saved_bytes == x.nbytes
    found, exact = (torch.autograd.grad(z, layer.weight)[0] for z in (y, layer(x).sum()))
    assert torch.equal(found, exact)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_an_expanded_tensor_counts_for_the_memory_that_it_covers(dtype: torch.dtype) -> None:
    x = input_of(64, 60)
    index = torch.zeros(64, 1, dtype=torch.long).expand(64, 60)
    with compress(min_bytes=0) as stats:
        factor = torch.ones(64, 1).expand(64, 60)
        x.gather(1, index) if dtype == torch.long else x * factor
    tally = stats.kept["integer" if dtype == torch.long else "statistic"]
    assert tally.seen_bytes == 64 * dtype.itemsize


def test_a_small_view_does_not_hold_a_large_storage() -> None:
    def forward() -> torch.Tensor:
        x = input_of(256, 1024)
        with compress(min_bytes=64 * 1024):
            return (x * 2)[:, 0].square()  # saves one column: 1 KiB

    taken, y = held_bytes(forward)
    assert taken < 16 * 1024 + 256 * 1024 * 4  # nothing but the leaf
    del y
