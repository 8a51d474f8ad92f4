"""The fuzz of activation compression, a short one; `python -m tests.fuzz` is the long one.

With each planted fault it must fail: a test that sees none of them would see no fault of ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fuzz import compare
from tests.fuzz.compare import FaultError, check
from tests.fuzz.directed import PROGRAMS, program, setting
from tests.fuzz.faults import FAULTS, ONLY_WITH_CUDA
from tests.fuzz.search import search
from vramx.compression import session

SEED = 20
HERE = FAULTS | (ONLY_WITH_CUDA if torch.cuda.is_available() else {})


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
    check(*PROGRAMS[name])
    with HERE[name].plant(), pytest.raises(FaultError):
        check(*PROGRAMS[name])


def test_each_fault_has_aprogram() -> None:
    assert set(PROGRAMS) == {*FAULTS, *ONLY_WITH_CUDA}


def test_random_programs_find_a_fault_too() -> None:
    fault = FAULTS["packs the tensors of unknown Functions"]
    with fault.plant():
        found = search(100, SEED, names=fault.names, shrink=False)
    assert found.fault, f"seed {SEED}: {found.checked} programs ran as if nothing were wrong"


def test_gradients_that_are_short_have_a_cosine() -> None:
    short = torch.tensor([3e-12, 4e-12])
    assert compare._cosine(short, 2 * short) == pytest.approx(1)
    assert compare._cosine(short, short.flip(0)) == pytest.approx(0.96)
    assert compare._cosine(short, 0 * short) == 0


# Programs that have failed, in their smallest form.


def test_a_mean_of_many_deviations_before_a_norm() -> None:
    """bfloat16 rounds the input of the norm, and normalises what it has rounded; a packed input
    was off by many deviations from the mean that the norm had saved."""
    lines = ("h = self.a(h) + 300", "h = h + self.b(h.transpose(1, 2)).transpose(1, 2)")
    source = program(("nn.Linear(64, 64)", "nn.InstanceNorm1d(64, affine=True)"), lines)
    check(source, setting())
    with FAULTS["packs inputs of norms as other numbers"].plant(), pytest.raises(FaultError):
        check(source, setting())


def test_a_factor_that_is_repeated_over_columns() -> None:
    """In a group with the largest scale the smallest is next to nothing."""
    lines = ("h = h * torch.logspace(-2, 2, 64).to(h)", "h = self.a(h.transpose(1, 2))")
    check(program(("nn.BatchNorm1d(64)",), lines), setting())


def test_a_power_of_a_power(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("h = (self.a(h) * 2).square().square().square()", "h = pieces.Divides.apply(h)")
    source = program(("nn.Linear(64, 64)",), lines)
    check(source, setting())
    monkeypatch.setattr(session, "POWERS", frozenset())
    with pytest.raises(FaultError):
        check(source, setting())
