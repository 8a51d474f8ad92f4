"""vramx.checkpoint within another checkpoint, or within compress()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import (
    SMALL,
    WIDTH,
    Block,
    Packs,
    activation,
    cosine,
    gradients,
    packs,
    seeds,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import vramx
from vramx.compression import enclosing

__all__ = ["packs", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds")


@pytest.mark.parametrize("outer", [torch_checkpoint, vramx.checkpoint])
def test_within_a_checkpoint_nothing_is_packed(outer: Callable[..., Any], packs: Packs) -> None:
    block = Block()
    block.register_buffer("unread", torch.ones(1))

    def region(x: torch.Tensor) -> torch.Tensor:
        return vramx.checkpoint(block, x.sin(), level=SMALL)

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
        return vramx.checkpoint(block, x.sin(), level=SMALL)

    torch_checkpoint(region, activation(), use_reentrant=False).sum().backward()
    assert packs.sizes == []
    region(activation()).sum().backward()
    assert packs.sizes == [32 * WIDTH]
