"""What was seen of a call holds for calls that take the same way through the code, and no others.

A notebook defines a function again, a part is replaced, an attribute switches: what runs is then
another function, of which nothing was seen. Here it is one of whose input a phase is taken.
"""

from __future__ import annotations

import _thread
import queue
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, Packs, check_near, gradients, packs, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx.compression import enclosing
from vramx.errors import VramxWarning
from vramx.recompute import region, verdicts, way

__all__ = ["packs", "quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")
SIZE = 32 * WIDTH
TOLD = pytest.mark.skipif(
    not enclosing.is_told(), reason="before torch 2.8 ways are not told apart"
)


def smooth(block: Any, x: Tensor) -> Tensor:
    return block.outer(F.gelu(block.inner(x)))


def phase(block: Any, x: Tensor) -> Tensor:
    return block.outer(torch.sin(block.inner(x))) + torch.cos(x * 30)


class Phase(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * 30)


class Block(nn.Module):
    """Calls what may be another function in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first: nn.Module = nn.Identity()
        self.turns = False

    def part(self, x: Tensor) -> Tensor:
        return smooth(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return phase(self, x) if self.turns else self.part(self.first(x))


def by_method(_block: Block, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Block, "part", phase)


def by_code(_block: Block, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(smooth, "__code__", phase.__code__)  # as a reload does


def by_name(_block: Block, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "smooth", phase)


def by_forward(block: Block, _patch: pytest.MonkeyPatch) -> None:
    block.forward = types.MethodType(phase, block)  # type: ignore[method-assign]


def by_attribute(block: Block, _patch: pytest.MonkeyPatch) -> None:
    block.turns = True


def by_part(block: Block, _patch: pytest.MonkeyPatch) -> None:
    block.first = Phase()


@TOLD
@pytest.mark.parametrize("options", [{}, {"preserve_rng_state": False}], ids=["ours", "torchs"])
@pytest.mark.parametrize("change", [by_method, by_code, by_name, by_forward, by_attribute, by_part])
def test_a_call_of_changed_code_is_not_taken_for_what_it_was(
    change: Callable[[Block, pytest.MonkeyPatch], None],
    options: dict[str, Any],
    packs: Packs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Block()
    run = lambda x: vramx.checkpoint(block, x, level=SMALL, **options)  # noqa: E731
    gradients(run, block)
    assert packs.sizes == [SIZE]
    change(block, monkeypatch)
    for _ in range(3):  # one that was not watched, one that is, and one after it
        check_near(gradients(run, block), gradients(block, block), "keep")
    assert packs.sizes == [SIZE]


@TOLD
def test_a_smooth_way_that_is_new_is_packed_once_it_was_seen(packs: Packs) -> None:
    block = Block()
    run = lambda x: vramx.checkpoint(block, x, level=SMALL)  # noqa: E731
    gradients(run, block)
    block.first = nn.GELU()
    for packed in (1, 2, 3):
        check_near(gradients(run, block), gradients(block, block), SMALL)
        assert len(packs.sizes) == packed


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rounds = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = x + F.silu(self.layer(self.norm(x))) @ self.layer.weight
        return x


def test_calls_of_the_same_way_are_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a loop goes round more often, and when Python has made its code faster."""
    watched = list[int]()
    watch = region.Watch
    monkeypatch.setattr(region, "Watch", lambda *args: watched.append(1) or watch(*args))
    loop = Loop()
    for i in range(24):
        loop.rounds = 1 + i % 3
        gradients(lambda x: vramx.checkpoint(loop, x, level=SMALL), loop)
    assert len(watched) == 1


@TOLD
def test_a_thread_of_torch_has_no_code() -> None:
    """There is no frame of Python above the hook, as in a device's thread for backward."""
    given = queue.SimpleQueue[Tensor]()
    hook, tensor = way._Noting(steps := way.Steps(), given.put), torch.ones(1)
    _thread.start_new_thread(hook, (tensor,))
    assert given.get(timeout=10) is tensor
    assert steps.way() == way.Steps().way()


def test_a_way_that_no_watched_call_takes_is_kept_exactly_and_watched_for_no_longer() -> None:
    verdict, other = verdicts.Verdict(""), verdicts.Way(2, ())
    for _ in range(2):
        assert verdicts.of_way("key", smooth, verdicts.Way(1, ()), verdict) is verdict
    assert verdicts.of_way("key", smooth, other, None).rough
    tries = 0
    while verdicts.known("key") is None:
        verdicts.of_way("key", smooth, verdicts.Way(1, ()), verdict)
        tries += 1
    assert 1 < tries < 10
    assert verdicts.of_way("key", smooth, other, None).rough
    assert verdicts.known("key") is not None
    del verdicts._seen["key"]


def test_ways_beyond_the_most_are_kept_exactly_and_named_once() -> None:
    fine, most = verdicts.Verdict(""), verdicts._MOST_WAYS
    for number in range(most):
        assert verdicts.of_way("key", smooth, verdicts.Way(number, ()), fine) is fine
    with pytest.warns(VramxWarning, match=f"smooth exactly.*than the first {most}"):
        assert verdicts.of_way("key", smooth, verdicts.Way(most, ()), None).rough
    assert verdicts.known("key") is fine
    verdicts.of_way("key", smooth, verdicts.Way(most + 1, ()), fine)  # watched, as some always are
    assert len(verdicts._seen["key"].by_way) == most
    del verdicts._seen["key"]
