"""A recomputation draws the numbers of its call, from generators that come later as well."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import numpy
import pytest
import torch
from checkpoint_tools import WIDTH, activation, plain, quiet, seeds

import vramx

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

# As in a notebook, whose functions stay while its names come and change.
NOTEBOOK = """
from torch import nn

drawn = None
def region(x):
    numbers = globals().get("later", drawn)
    return (x * (1.0 if numbers is None else numbers.random())).square()

def closing(numbers):
    class Scaling(nn.Module):
        def forward(self, x):
            return (x * (1.0 if numbers is None else numbers.random())).square()
    def change(now):
        nonlocal numbers
        numbers = now
    return Scaling(), change
"""


@pytest.mark.parametrize("where", ["drawn", "later", "closed over"])
def test_a_generator_that_comes_after_the_first_call_is_set_back(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook: Any = types.ModuleType(f"notebook_{where}")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    exec(NOTEBOOK, vars(notebook))
    region, change = notebook.region, functools.partial(setattr, notebook, where)
    if where == "closed over":
        region, change = notebook.closing(None)
    checkpoint = functools.partial(vramx.checkpoint, level="keep")
    checkpoint(region, activation()).sum().backward()
    x = torch.ones(4, WIDTH, requires_grad=True)
    found = []
    for call in (plain, checkpoint):
        change(numpy.random.default_rng(0))
        found += torch.autograd.grad(call(region, x * 1).sum(), x)
    assert torch.equal(*found)
