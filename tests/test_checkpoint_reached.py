"""How much of what a checkpointed function reaches is looked at in each call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import LEVELS, WIDTH, quiet, seeds
from torch import Tensor, nn

import vramx
from vramx.recompute import reached

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

MANY = 3000
CONTAINERS: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: list(range(n)),
    "words": lambda n: tuple(map(str, range(n))),
    "vocabulary": lambda n: {str(i): i for i in range(n)},
    "lists in a list": lambda n: [[i] for i in range(n)],
    "a set within a list": lambda n: [set(range(n))],
}


def calls_of_python(run: Callable[[], Any]) -> int:
    """Return how many functions written in Python a run calls."""
    count = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event == "call"

    run()  # what is worked out once
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@LEVELS
@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_call_does_not_go_through_what_is_in_a_large_container(
    kind: str, level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reached, "_MOST_PARTS", 16)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)

    def calls(items: Any) -> int:
        def region(y: Tensor) -> Tensor:
            return layer(y) if items is not None else y

        return calls_of_python(lambda: vramx.checkpoint(region, x * 1, level=level))

    assert calls(CONTAINERS[kind](MANY)) - calls(CONTAINERS[kind](1)) < MANY / 10


def test_a_norm_behind_many_numbers_moves_its_statistics_once() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    items = [*range(MANY), norm]
    y = vramx.checkpoint(lambda x: 2 * items[-1](x), torch.randn(4, WIDTH, requires_grad=True))
    y.sum().backward()
    assert norm.num_batches_tracked == 1


def test_objects_that_are_not_looked_at_are_told_of() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    items = [*([i] for i in range(MANY)), norm]
    with pytest.warns(UserWarning, match=f"a list of {MANY + 1} objects"):
        y = vramx.checkpoint(lambda x: 2 * items[-1](x), torch.randn(4, WIDTH, requires_grad=True))
    y.sum().backward()
    assert norm.num_batches_tracked == 1


class _Bag(list[Any]):
    pass


class _Names(dict[str, Any]):
    pass


@pytest.mark.parametrize("bag", [_Bag(), _Bag([1, 2]), _Names(), _Names(a=1)])
def test_a_container_of_a_class_of_its_own_has_its_attributes_too(bag: Any) -> None:
    bag.norm = nn.BatchNorm1d(4)
    layer = nn.Linear(4, 4)
    vramx.checkpoint(
        lambda x: bag.norm(layer(x)).tanh(), torch.randn(8, 4), level="keep"
    ).sum().backward()
    assert bag.norm.num_batches_tracked == 1


class _Hides(nn.Module):
    """Runs what it has in an attribute, and is none of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made if self.hidden is None else self.hidden[0](made)


@LEVELS
def test_a_norm_that_is_no_part_moves_its_statistics_once(level: Any) -> None:
    module = _Hides()
    norms = [nn.BatchNorm1d(WIDTH) for _ in range(2)]
    for norm in (None, *norms, norms[0], None, norms[1]):
        module.hidden = None if norm is None else [nn.Sequential(norm, nn.Tanh())]
        x = torch.randn(4, WIDTH, requires_grad=True)
        vramx.checkpoint(module, x, level=level).sum().backward()
    assert [int(norm.num_batches_tracked) for norm in norms] == [2, 2]  # type: ignore[arg-type]
