"""Objects that a region reaches: which are copied for a recomputation, and which are not."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, Seen, activation, quiet, seeds
from torch import Tensor, nn

import vramx
from vramx.errors import RecomputationError
from vramx.recompute.copies import MOST_BYTES

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")


class Scaled(nn.Module):
    """Takes a scale from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.source = iter([2.0, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * next(self.source)


def test_a_tensor_that_is_counted_up_in_an_argument_is_an_error() -> None:
    def region(x: Tensor, state: Any) -> Tensor:
        state.count += 1
        return x.sin()

    state = types.SimpleNamespace(count=torch.zeros(()))
    with pytest.raises(RecomputationError, match="writes into a tensor of its argument, a Simple"):
        vramx.checkpoint(region, activation(), state, level="keep")


def test_modules_and_generators_are_the_callers_own() -> None:
    seen = Seen()

    def region(x: Tensor, module: nn.Module, generator: torch.Generator) -> Tensor:
        seen.extend((module, generator))
        return module(x).sin()

    layer, generator = nn.Linear(WIDTH, WIDTH), torch.Generator()
    vramx.checkpoint(region, activation(), layer, generator, level=SMALL).sum().backward()
    assert [id(each) for each in seen] == [id(layer), id(generator)] * 2


class Handle:
    """Something that is closed when it goes, as a temporary file or a process is."""

    closed = 0

    def __init__(self) -> None:
        self.number = 7

    def __del__(self) -> None:
        type(self).closed += 1


@pytest.mark.parametrize("way", ["attribute", "argument", "closed over"])
def test_what_is_closed_when_it_goes_is_not_copied(way: str) -> None:
    Handle.closed = 0
    handle = types.SimpleNamespace(inner=Handle())
    module = Scaled()
    module.handle = handle
    region: Callable[..., Tensor] = {
        "attribute": module,
        "argument": lambda x, _: x.sin(),
        "closed over": lambda x: x.sin() * handle.inner.number,
    }[way]
    given = [handle] if way == "argument" else []
    vramx.checkpoint(region, activation(), *given, level="keep").sum().backward()
    assert Handle.closed == 0
    assert handle.inner.number == 7


def test_what_is_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped files of tokens, and tensors that are neither parameters nor buffers."""
    copied: list[int] = []
    clone = Tensor.clone
    monkeypatch.setattr(
        Tensor, "clone", lambda x, **how: copied.append(x.nbytes) or clone(x, **how)
    )
    for name in ("wholes", "copies"):
        monkeypatch.setattr(
            f"vramx.recompute.{name}.another",
            lambda x, known=None: copied.append(getattr(x, "nbytes", 0)) or x,
        )
    data = types.SimpleNamespace(tokens=np.zeros(MOST_BYTES + 1, np.uint8), batches=[])
    module = Scaled()
    module.data, module.table = data, torch.zeros(MOST_BYTES // 4 + 1)
    vramx.checkpoint(lambda x: module(x) * (data.tokens[0] + 1), activation(), level="keep")
    assert max(copied, default=0) <= MOST_BYTES
    # Together, too; and nothing in each call of what no note can be taken of.
    copied.clear()
    module = Scaled()
    for i in range(3):
        setattr(module, f"table{i}", torch.zeros(MOST_BYTES // 8))
    few = types.SimpleNamespace(table=module.table0)
    vramx.checkpoint(lambda x: module(x) * few.table[0], activation(), level="keep")
    assert MOST_BYTES // 2 <= sum(copied) <= 1.1 * MOST_BYTES


class Program:
    """As a trainer: it holds its data, and counts."""

    def __init__(self, data: Any) -> None:
        self.data, self.number, self.kept = data, 0, [data]

    def block(self, x: Tensor) -> Tensor:
        self.number += 1
        self.kept.append(self.number)
        return x.sin() * self.number * len(self.kept)


@pytest.mark.parametrize(
    "data", [lambda: [[] for _ in range(10_001)], lambda: np.zeros(MOST_BYTES + 1)]
)
def test_a_whole_program_that_is_closed_over_is_shared(data: Callable[[], Any]) -> None:
    x, gradients = torch.ones(4, 16, requires_grad=True), []
    for checkpointed in (False, True):
        program, y = Program(data()), x * 1.0
        for i in range(2):
            block = lambda y: program.block(y) / (i + 1)  # noqa: B023, E731
            y = vramx.checkpoint(block, y, level="keep") if checkpointed else block(y)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
        assert (program.number, program.kept[1:]) == (2, [1, 2])
    torch.testing.assert_close(*gradients)
