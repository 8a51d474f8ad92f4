"""vramx.checkpoint does what torch's does, but for what it keeps of the inputs; within it, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpoint_tools import (
    SMALL,
    WIDTH,
    Block,
    Packs,
    Seen,
    activation,
    bent,
    cosine,
    gradients,
    packs,
    seeds,
)
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import vramx
from vramx.compression import enclosing
from vramx.errors import InvalidValueError

__all__ = ["packs", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds")


def test_rng_state_is_not_restored_when_told_so() -> None:
    leaf = torch.ones(64, WIDTH, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * leaf, 0.5)

    y = vramx.checkpoint(region, activation(64, WIDTH), level=SMALL, preserve_rng_state=False)
    torch.manual_seed(7)
    y.sum().backward()
    assert not torch.equal(leaf.grad != 0, y.detach() != 0)


def test_autocast_holds_in_the_recomputation() -> None:
    dtypes = Seen()
    layer = nn.Linear(WIDTH, WIDTH)

    def region(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        dtypes.append(y.dtype)
        return y.float().sin()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = vramx.checkpoint(region, activation(), level=SMALL)
    y.sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("how", ["option", "context"])
def test_early_stop_is_honoured(how: str, early_stop: bool) -> None:
    block, calls = Block(), Seen()

    def region(x: torch.Tensor) -> torch.Tensor:
        y = block(x)
        calls.append(1)  # past the last saved tensor: early stopping does not come here
        return y

    context = set_checkpoint_early_stop(early_stop) if how == "context" else nullcontext()
    options = {"early_stop": early_stop} if how == "option" else {}
    with context:
        y = vramx.checkpoint(region, activation(), level=SMALL, **options)
    y.sum().backward()
    assert len(calls) == (1 if early_stop else 2)


def test_selective_policy_composes() -> None:
    block, products = Block(), []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        products.extend([op] if keep else [])
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    exact = gradients(block, block)
    packed = gradients(
        lambda x: vramx.checkpoint(block, x, level=SMALL, context_fn=contexts), block
    )
    assert products, "the policy was never asked"
    assert cosine(exact, packed) > 0.999


def test_a_result_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="not block"):
        vramx.checkpoint(nn.Linear(4, 4)(torch.ones(1, 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"debug": True, "context_fn": list}, "debug=True is incompatible"),
        ({"determinism_check": "strong"}, "determinism_check should be one of"),
    ],
)
def test_what_torch_refuses_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vramx.checkpoint(Block(), activation(), level=SMALL, **options)


def test_an_input_changed_in_place_does_no_harm_where_it_was_packed() -> None:
    x = activation(8, 16)
    leaf = torch.zeros(8, 16, requires_grad=True)
    y = vramx.checkpoint(torch.mul, x, leaf, level=SMALL)
    expected = x.detach().clone()
    with torch.no_grad():
        x.fill_(float("nan"))
    y.sum().backward()
    # Roots are packed of a factor. A step of one is 1/127 of the largest of a group, the scale
    # rounded up by under 1 %, and what it is of has twice that, and its square.
    step = 1.01 / 127
    assert (leaf.grad - expected).abs().max() < (2 * step + step**2) * expected.abs().max()


def test_arguments_in_forward_are_the_callers_own() -> None:
    given = {"x": activation(8, 16)}
    seen = Seen()

    def region(argument: dict[str, torch.Tensor]) -> tuple[torch.Tensor, str]:
        seen.append(argument is given)
        return argument["x"].sin(), "text"

    y, text = vramx.checkpoint(region, given, level=SMALL)
    y.sum().backward()
    assert (seen, text) == ([True, False], "text")


def test_region_without_gradient_in_its_inputs_trains_its_parameters() -> None:
    layer = nn.Linear(16, 16)
    vramx.checkpoint(layer, torch.randn(8, 16), level=SMALL).sum().backward()
    assert layer.weight.grad is not None


def test_under_no_grad_it_is_a_plain_call(packs: Packs) -> None:
    with torch.no_grad():
        y = vramx.checkpoint(torch.sin, activation(8, 16), level=SMALL)
    assert (y.requires_grad, packs.sizes) == (False, [])


# -- Within another checkpoint, or within compress() ----------------------------------------------


@pytest.mark.parametrize("outer", [torch_checkpoint, vramx.checkpoint])
def test_within_a_checkpoint_nothing_is_packed(outer: Callable[..., Any], packs: Packs) -> None:
    block = Block()
    block.register_buffer("unread", torch.ones(1))

    def region(x: torch.Tensor) -> torch.Tensor:
        return vramx.checkpoint(block, bent(x), level=SMALL)

    own = {"level": SMALL} if outer is vramx.checkpoint else {}
    x = activation()
    outer(region, x, use_reentrant=False, **own).sum().backward()
    assert packs.sizes == ([x.numel()] if own else []), (
        "the inner inputs are the outer's to recompute"
    )


def test_within_compress_inputs_are_packed_once_as_the_checkpoint_says(packs: Packs) -> None:
    block = Block()
    exact = gradients(block, block)

    def run(x: torch.Tensor) -> torch.Tensor:
        with vramx.compress(level="int4", min_bytes=0) as stats:
            y = vramx.checkpoint(block, x, level=SMALL)
        assert stats.packed.tensors == 0, "the context packed what the checkpoint keeps"
        return y

    packed = gradients(run, block)
    assert packs.sizes == [32 * WIDTH]
    assert cosine(exact, packed) > 0.999


def test_a_checkpoint_is_seen_by_its_frames_where_torch_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, packs: Packs
) -> None:
    """As before torch 2.8."""
    monkeypatch.setattr(enclosing, "_top_hooks", None)
    block = Block()

    def region(x: torch.Tensor) -> torch.Tensor:
        return vramx.checkpoint(block, bent(x), level=SMALL)

    torch_checkpoint(region, activation(), use_reentrant=False).sum().backward()
    assert packs.sizes == []
    region(activation()).sum().backward()
    assert packs.sizes == [32 * WIDTH]
