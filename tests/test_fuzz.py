"""The fuzz of activation compression, a short one; `python -m tests.fuzz` is the long one.

With each planted fault it must fail: a test that sees none of them would see no fault of ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fuzz.faults import FAULTS
from tests.fuzz.search import search

SEED = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    yield
    torch.set_num_threads(before)


def test_random_programs_have_the_gradients_that_they_have_without_packing() -> None:
    found = search(30, SEED)

    assert not found.fault, f"seed {SEED}\n{found}"
    assert found.checked >= 30


@pytest.mark.parametrize("name", HERE)
def test_a_planted_fault_is_found(name: str) -> None:
    program = PROGRAMS[name]
    check(*program)
    with HERE[name].plant(), pytest.raises(FaultError):
        check(*program)


def test_each_fault_has_a_program() -> None:
    assert set(PROGRAMS) == set(FAULTS) | set(ONLY_WITH_CUDA)


def test_random_programs_find_a_fault_too() -> None:
    fault = FAULTS["packs the tensors of unknown Functions"]
    with fault.plant():
        found = search(100, SEED, names=fault.names, shrink=False)
    assert found.fault, f"seed {SEED}: {found.checked} programs ran as if nothing were wrong"


# Programs that have failed, in their smallest form.


def test_a_mean_of_many_deviations_before_a_norm() -> None:
    """bfloat16 rounds the input of the norm, and normalises what it has rounded; a packed input
    was off by many deviations from the mean that the norm had saved."""
    lines = ("h = self.a(x)", "h = self.b(h + 300)")
    check(_program(("nn.Linear(64, 64)", "nn.LayerNorm(64)"), lines), _setting(rounding="nearest"))


def test_a_factor_that_is_repeated_over_columns() -> None:
    """In a group with the largest scale the smallest is next to nothing."""
    lines = ("h = self.b(h * torch.logspace(-2, 2, 64).to(h))",)
    check(_program(("nn.Linear(64, 64)", "nn.LayerNorm(64)"), lines), _setting())
