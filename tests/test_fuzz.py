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


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]

    with fault.plant():
        found = search(100, SEED, names=fault.names, shrink=False)

    assert found.fault, f"seed {SEED}: {found.checked} programs ran as if nothing were wrong"
