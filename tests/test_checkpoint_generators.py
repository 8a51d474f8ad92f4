"""A recomputation draws the numbers of its call, from generators that come later as well."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import numpy
import pytest
import torch
from checkpoint_tools import WIDTH, activation, quiet, seeds
from torch import Tensor, nn

import vramx

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

NOTEBOOK = """
drawn = None
def region(x):
    numbers = globals().get("later", drawn)
    return (x * (1.0 if numbers is None else numbers.random())).square()
"""


@pytest.mark.parametrize("name", ["drawn", "later"])
def test_a_generator_that_comes_after_the_first_call_is_set_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose functions stay while its names come and change."""
    notebook: Any = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, f"notebook_{name}", notebook)
    notebook.__name__ = f"notebook_{name}"
    exec(NOTEBOOK, vars(notebook))
    vramx.checkpoint(notebook.region, activation(), level="keep").sum().backward()
    x = torch.ones(4, WIDTH, requires_grad=True)
    found = []
    for run in (
        notebook.region,
        functools.partial(vramx.checkpoint, notebook.region, level="keep"),
    ):
        setattr(notebook, name, numpy.random.default_rng(0))
        found += torch.autograd.grad(run(x * 1).sum(), x)
    assert torch.equal(*found)


def test_a_generator_that_a_method_closes_over_later_is_set_back() -> None:
    numbers: Any = None

    class Scaling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * (1.0 if numbers is None else numbers.random())).square()

    module, x = Scaling(), torch.ones(4, WIDTH, requires_grad=True)
    vramx.checkpoint(module, x * 1, level="keep").sum().backward()
    found = []
    for run in (module, functools.partial(vramx.checkpoint, module, level="keep")):
        numbers = numpy.random.default_rng(0)
        found += torch.autograd.grad(run(x * 1).sum(), x)
    assert torch.equal(*found)
