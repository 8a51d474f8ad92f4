"""compress() beside the rest of torch: checkpoints, other hooks, transforms of torch.func."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compress_tools import Block, gradient, held_bytes, input_of, recorded_packs, relative_error
from optimize_tools import INT8_NOISE, error
from torch import nn
from torch.utils.checkpoint import checkpoint

import vramx
from vramx import errors
from vramx.compression import enclosing
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


# Transforms of torch.func: where one is active, compression steps aside

TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,))[1],
    "jacfwd": lambda net, x: torch.func.jacfwd(net)(x),
    "vmap of jvp": lambda net, x: torch.func.vmap(lambda r: torch.func.jvp(net, (r,), (r,))[1])(x),
}
# torch itself refuses to enter these where hooks are, so that they go around a module only.
REVERSE: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda net, x: torch.func.grad(lambda t: net(t).sum())(x),
    "vmap of grad": lambda net, x: torch.func.vmap(torch.func.grad(lambda t: net(t).sum()))(x),
    "jacrev": lambda net, x: torch.func.jacrev(net)(x),
    "hessian": lambda net, x: torch.func.hessian(lambda t: net(t).sum())(x[0]),
}


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


@pytest.mark.parametrize("how", [*TRANSFORMS, *REVERSE])
def test_transforms_of_torch_func_around_a_packed_module_are_exact(how: str) -> None:
    net, x = small_net(), torch.randn(4, 8)
    transform = (TRANSFORMS | REVERSE)[how]
    expected = transform(net, x)
    vramx.compressed_activations(net, min_bytes=0)
    assert torch.equal(transform(net, x), expected)
    assert vramx.compression_stats(net).packed.tensors == 0


@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_of_torch_func_within_a_context_are_exact(how: str) -> None:
    net, x = small_net(), torch.randn(4, 8)

    def weight_gradient() -> torch.Tensor:
        net.zero_grad()
        TRANSFORMS[how](net, x).sum().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    expected = weight_gradient()
    with compress(min_bytes=0) as stats:
        found = weight_gradient()
    assert torch.equal(found, expected)
    assert stats.packed.tensors == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("way", ["context", "module", "checkpoint"])
@pytest.mark.parametrize("how", REVERSE)
def test_torchs_error_of_a_transform_within_says_what_to_do(how: str, way: str) -> None:
    net, x = small_net(), torch.randn(4, 8)

    class Within(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return REVERSE[how](net, x)

    def in_context(x: torch.Tensor) -> None:
        with compress(min_bytes=0):
            Within()(x)

    call: Any = {
        "context": in_context,
        "module": vramx.compressed_activations(Within(), min_bytes=0),
        "checkpoint": functools.partial(vramx.checkpoint, Within(), level="keep"),
    }[way]
    with pytest.raises(RuntimeError, match="support saved tensor hooks") as caught:
        call(x)
    (note,) = caught.value.__notes__
    assert "leave modules out whose forward calls torch.func.grad" in note
    del caught
    gc.collect()  # before torch 2.13 a checkpoint that has failed leaves its hooks until then


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorised_jacobians_within_a_context_are_near(strategy: str) -> None:
    net, x = small_net(), torch.randn(4, 8)
    jacobian = torch.autograd.functional.jacobian
    expected = jacobian(net, x, vectorize=True, strategy=strategy)
    with compress(min_bytes=0):
        found = jacobian(net, x, vectorize=True, strategy=strategy)
    assert error(found, expected) < INT8_NOISE


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_a_vectorised_jacobian_that_asks_for_no_gradient_runs_within_a_context(
    strategy: str,
) -> None:
    x = torch.randn(4, 8)
    jacobian = torch.autograd.functional.jacobian
    with compress(min_bytes=0):
        found = jacobian(torch.sin, x, vectorize=True, strategy=strategy)
    expected = torch.diag(x.cos().flatten()).view(4, 8, 4, 8)
    assert error(found, expected) < INT8_NOISE


def test_torch_says_itself_that_a_tensor_has_left_its_vmap() -> None:
    escaped = []
    torch.vmap(lambda x: escaped.append(x) or x * 2)(torch.randn(4, 8))
    with compress(min_bytes=0), pytest.raises(RuntimeError, match="may have escaped"):
        escaped[0].sin_()
