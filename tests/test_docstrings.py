"""The examples in docstrings say what happens; those of the public ones are the API's pages."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
import torch

import vramx

pytestmark = pytest.mark.slow
FILES = sorted(each.name for each in pkgutil.walk_packages(vramx.__path__, "vramx."))


def _tests_of(module: ModuleType) -> list[doctest.DocTest]:
    # As a program has them: what it defines is no function of vramx, and it has imported torch.
    names = {**vars(module), "torch": torch, "__name__": "program"}
    found = doctest.DocTestFinder(exclude_empty=True).find(module, globs=names)
    return [each for each in found if each.examples]


@pytest.mark.parametrize("name", FILES)
def test_examples_say_what_happens(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for each in _tests_of(module):
        runner.run(each, out=report.append)
    assert not runner.failures, "".join(report)


def test_an_example_that_is_wrong_is_found() -> None:
    module = ModuleType("stale", "    >>> torch.ones(2).sum()\n    tensor(3.)\n")
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for each in _tests_of(module):
        runner.run(each, out=report.append)
    assert runner.failures == 1
    assert "tensor(2.)" in "".join(report)
