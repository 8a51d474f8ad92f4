"""What operators know of the two passes of a recomputed block, and what recompute_all keeps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from optimize_tools import (
    LAYERS,
    assert_computes,
    encoder,
    encoder_inputs,
    gradient_of,
    optimised_copy,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import vramx
from vramx.compression import enclosing
from vramx.compression.codec import reference
from vramx.nn import passes
from vramx.nn.linear import linears
from vramx.nn.norm import rms_norm

INPUTS = encoder_inputs()
told = pytest.mark.skipif(not enclosing.is_told(), reason="torch names no innermost hooks")


class _Probe(torch.autograd.Function):
    """Saves its input; notes what is known of it in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: dict[str, list[bool]]) -> Tensor:
        ctx.notes = notes
        notes.setdefault("unread", []).append(passes.saves_are_unread())
        notes.setdefault("brief", []).append(passes.saves_are_brief())
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.notes.setdefault("overwritten", []).append(passes.may_be_overwritten(x))
        return gradient * 2, None


def _notes(within: Any = nullcontext) -> dict[str, list[bool]]:
    """Run a checkpoint of a probe forward and backward, as recompute_all runs a block."""
    notes: dict[str, list[bool]] = {}
    words = iter((passes.FIRST, passes.SECOND))

    def block(x: Tensor) -> Tensor:
        with passes.running(next(words)), within():
            return _Probe.apply(x * 3, notes) * 1  # type: ignore[no-any-return]

    x = torch.ones(4, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    return notes


@contextmanager
def _hooks_of_others() -> Iterator[None]:
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


@told
def test_the_first_pass_of_a_checkpoint_saves_what_nobody_reads() -> None:
    assert _notes()["unread"] == [True, False]


@told
def test_hooks_within_a_block_read_what_its_first_pass_saves() -> None:
    assert _notes(_hooks_of_others)["unread"] == [False]


def test_without_a_checkpoint_what_is_saved_is_read() -> None:
    with passes.running(passes.FIRST):
        assert not passes.saves_are_unread()
    assert not passes.saves_are_brief()


def test_what_is_made_again_for_one_reader_may_be_overwritten() -> None:
    assert _notes()["overwritten"] == [True]


def test_what_another_operator_saved_too_may_not_be_overwritten() -> None:
    def saves_twice(x: Tensor, notes: dict[str, list[bool]]) -> Tensor:
        # exp() saves its result, too; its backward comes after.
        return _Probe.apply(x.exp(), notes)  # type: ignore[no-any-return]

    notes: dict[str, list[bool]] = {}
    x = torch.ones(4, requires_grad=True)
    checkpoint(saves_twice, x, notes, use_reentrant=False).sum().backward()
    assert notes["overwritten"] == [False]


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_recomputed_block_packs_its_input_alone(monkeypatch: Any, norm_first: bool) -> None:
    packed, quantize = list[int](), reference.quantize
    counted = lambda *args, **options: packed.append(1) or quantize(*args, **options)  # noqa: E731
    monkeypatch.setattr(reference, "quantize", counted)
    original = encoder(norm_first=norm_first)
    model = optimised_copy(original, "recompute_all", keep=vramx.Compression(level="keep"))
    assert_computes(model, original, INPUTS)
    assert not packed
    vramx.optimize(model, "int8")
    gradient_of(model, INPUTS)
    assert len(packed) >= LAYERS


def test_linears_of_a_pass_keep_their_input_as_it_is() -> None:
    x = torch.randn(6, 128, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(4, 128, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with passes.running(passes.EITHER):
        normed = rms_norm(x, torch.ones(128, dtype=torch.float64))
        q, _ = linears(normed, weights)
    assert any(saved is not None and torch.equal(saved, normed.y) for saved in _saved_by(q))
    call = functools.partial(_two_products, weights=weights)
    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))


def _two_products(x: Tensor, weights: list[Tensor]) -> Tensor:
    with passes.running(passes.EITHER):
        q, k = linears(rms_norm(x), weights)
    return q * k


def _saved_by(y: Tensor) -> tuple[Tensor | None, ...]:
    node: Any = y.grad_fn
    saved: tuple[Tensor | None, ...] = node.saved_tensors
    return saved
