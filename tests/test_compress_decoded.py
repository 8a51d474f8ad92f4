"""Decoded copies of what compress() packed: made once, and held no longer than needed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from compress_tools import Attention, input_of, recorded_decodes
from test_compress_sharing import _nothing_is_left
from torch import nn

import vramx
from vramx.compression import saved, session
from vramx.compression.hooks import compress
from vramx.compression.saved import Holding, Restored, decoded_copies

__all__ = ["_nothing_is_left"]  # a fixture


def test_consecutive_users_decode_once_in_each_backward(monkeypatch: Any) -> None:
    attention, x = Attention(), input_of(4, 16, 64)
    with compress(min_bytes=0):
        y = attention(x).sum()
    with recorded_decodes(monkeypatch) as decoded:
        y.backward(retain_graph=True)
        # x once for q, k and v; v once for attention and for its output, which is computed again;
        # and the output for the projection. q and k are kept.
        assert len(decoded) == len(set(map(id, decoded))) == 3
        assert len(decoded_copies) == 0
        y.backward()
    assert len(decoded) == 6


class WritesIntoSaved(torch.autograd.Function):
    """Writes over what it saved in its backward, through memory that no version counter watches."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.numpy().fill(float("nan"))
        return grad


def test_a_function_that_writes_into_what_it_saved_spoils_nobody() -> None:
    layers, x = [nn.Linear(64, 64) for _ in range(2)], input_of(16, 64)
    with compress(min_bytes=0):
        y = layers[0](x).sum() + WritesIntoSaved.apply(x).sum() + layers[1](x).sum()
    y.backward()
    for layer in layers:
        assert bool(layer.weight.grad.isfinite().all())


def users_of_one(count: int) -> list[Restored]:
    x, kept = torch.randn(256), session.PlainCodec()
    holding = Holding(kept.encode(x, vramx.Compression().format()), kept)
    return [Restored(holding, session.describe(x), None) for _ in range(count)]


def test_a_decoded_copy_that_was_written_into_is_not_given_on() -> None:
    one, other = users_of_one(2)
    first = one.open()
    expected = first.clone()
    first.zero_()
    assert torch.equal(other.open(), expected)


def test_a_decoded_copy_goes_with_the_last_user_that_waits_for_it() -> None:
    users = users_of_one(3)
    users[0].open()
    for left in (1, 1, 0):
        assert len(decoded_copies) == left
        users.pop()


def test_one_decoded_copy_is_kept_at_a_time() -> None:
    one, two = users_of_one(2), users_of_one(2)
    copy = weakref.ref(one[0].open()._base)
    two[0].open()
    assert len(decoded_copies) == 1
    assert copy() is None


def test_a_decoded_copy_does_not_wait_for_a_distant_user() -> None:
    users = users_of_one(2)
    users[0].open()
    singles = [users_of_one(1)[0] for _ in range(saved.DecodedCopies.REACH + 1)]
    for single in singles:
        single.open()
    assert len(decoded_copies) == 0
    assert users
