"""compress() beside the rest of torch: checkpoints, other hooks, compilers."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from compress_tools import (
    Block,
    gradient,
    held_bytes,
    input_of,
    recorded_packs,
    relative_error,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramx import errors
from vramx.compression import enclosing, hooks
from vramx.compression.hooks import compress
from vramx.errors import VramxWarning


class Checkpointed(nn.Module):
    """A block whose forward is a checkpoint, with or without compression within."""

    def __init__(self, *, reentrant: bool = False, inside: bool = False) -> None:
        super().__init__()
        self.block = Block()
        self.reentrant = reentrant
        self.context = compress(min_bytes=0) if inside else contextlib.nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            with self.context:
                return self.block(x)

        return checkpoint(region, x, use_reentrant=self.reentrant)


# Checkpoints


def test_inside_a_checkpoint_it_steps_aside_and_says_so_once() -> None:
    errors._said.clear()
    module, x = Checkpointed(inside=True), input_of(4, 16, 64)
    with pytest.warns(VramxWarning, match="does nothing"):
        found = gradient(module, x)
    assert torch.equal(found, gradient(module.block, x))
    assert module.context.stats.tensors == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(module, x)


def test_inside_a_checkpoint_nothing_but_the_input_is_held(monkeypatch: Any) -> None:
    module, x = Checkpointed(inside=True), input_of(8, 64, 64)
    module(x)

    def share() -> float:
        taken, y = held_bytes(lambda: module(x).sum())
        del y
        return taken / (x.numel() * 4)

    assert share() < 0.1  # the input is the caller's
    monkeypatch.setattr(enclosing, "in_checkpoint", lambda: False)
    assert share() > 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_a_checkpoint_its_input_is_kept_unless_a_policy_says_so(
    reentrant: bool, monkeypatch: Any
) -> None:
    """The region computes with it again, and may compare or round what it finds."""
    module, x = Checkpointed(reentrant=reentrant), input_of(4, 16, 64)
    exact = gradient(module, x)
    context = compress(min_bytes=0)
    assert torch.equal(gradient(module, x, context), exact)
    assert context.stats.packed.tensors == 0
    policy = {"checkpoint": "int8", "CheckpointFunction": "int8"}
    with recorded_packs(monkeypatch) as packed:
        found = gradient(module, x, compress(min_bytes=0, policy=policy))
    assert len(packed) == 1
    assert torch.equal(packed[0], x.detach().flatten())
    assert 0 < relative_error(found, exact) < 0.05


def test_dropout_is_recomputed_alike() -> None:
    module, x = Checkpointed(), input_of(4, 16, 64)
    module.block.dropout.p = 0.3
    assert relative_error(gradient(module, x, compress(min_bytes=0)), gradient(module, x)) < 0.05


def test_a_context_within_a_checkpoint_within_a_context() -> None:
    errors._said.add(hooks._IN_CHECKPOINT)
    module, x = Checkpointed(inside=True), input_of(4, 16, 64)
    outer = compress(min_bytes=0, policy={"checkpoint": "int8"})
    gradient(module, x, outer)
    assert outer.stats.packed.tensors == 1
    assert module.context.stats.tensors == 0


# Other hooks


def test_of_hooks_the_innermost_decide() -> None:
    block, x = Block(), input_of(4, 16, 64)
    with torch.autograd.graph.save_on_cpu(), compress(min_bytes=0) as stats:
        block(x)
    assert stats.packed.tensors > 0
    with compress(min_bytes=0) as stats, torch.autograd.graph.save_on_cpu():
        x.sin()
    assert stats.tensors == 0
    forbidden = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with forbidden, compress(min_bytes=0) as stats:
        x.sin()
    assert stats.tensors == 0


# Scaling, accumulation, sharing


def test_a_gradient_scaler_sees_an_overflow() -> None:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = layer.weight.detach().clone()
    x = input_of(8, 64)
    with torch.no_grad():
        x[3, 5] = float("inf")
    with compress(min_bytes=0):
        y = layer(x)
    # The loss is finite: only what was saved knows of the overflow.
    scaler.scale(y.nan_to_num(0, 0, 0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() < 4.0


def test_a_layer_that_is_called_twice_gets_both_gradients() -> None:
    layer, x = nn.Linear(64, 64), input_of(8, 64)
    twice = nn.Sequential(layer, nn.Tanh(), layer)
    assert relative_error(gradient(twice, x, compress(min_bytes=0)), gradient(twice, x)) < 0.05


def test_gradients_accumulate_over_forward_passes() -> None:
    layer, one, two = nn.Linear(64, 64), input_of(8, 64), input_of(8, 64) * 3
    with compress(min_bytes=0):
        losses = [layer(one).sum(), layer(two).sum()]
    for loss in losses:
        loss.backward()
    expected = (one + two).detach().sum(0).expand(64, 64)
    assert relative_error(layer.weight.grad, expected) < 0.05


# Compilers
