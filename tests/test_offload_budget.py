"""What offloading moves, and when: a fraction of the bytes, or as much as the link hides.

Of a fraction the oldest leave first. "cpu" moves what the link can copy while layers compute, as
measured in earlier steps, and spreads that over the step; the report tells bandwidth and what was
hidden. Time is a FakeLink's, which counts it: nothing here depends on the machine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_link import BLOCK_BYTES, FakeLink
from offload_tools import forward, moved_in_a_step, stash_on, states

from vramx.compression.offload import offload
from vramx.compression.offload.budget import Budget
from vramx.compression.offload.parcel import State
from vramx.compression.offload.stash import Stash


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.5, 4), (0.25, 2), (1.0, 8)])
def test_a_fraction_of_the_bytes_leaves_the_oldest_first(share: float, expected: int) -> None:
    link = FakeLink()
    stash = stash_on(link, share, window_blocks=8)
    assert moved_in_a_step(link, stash) == 8  # all in the first step
    tickets = forward(link, stash)
    assert states(tickets) == [State.LEAVING] * expected + [State.RESIDENT] * (8 - expected)


def test_an_old_graph_that_is_kept_does_not_stop_the_counting_of_steps() -> None:
    link = FakeLink(blocks=256)
    stash = stash_on(link, 0.5)
    moved_in_a_step(link, stash)
    _kept = forward(link, stash, count=1)
    moved = [moved_in_a_step(link, stash) for _ in range(6)]
    assert moved[-1] >= 4


def timed_step(
    link: FakeLink, stash: Stash, layer_ms: float, count: int = 8, asked: int = 8
) -> None:
    """One step of a program that computes as long in backward as in forward.

    Of more than `asked` tensors backward is broken off, as where it runs out of memory.
    """
    tickets = []
    for value in range(1, count + 1):
        link.compute(layer_ms)
        tickets.append(stash.put(link.produce(value)))
    for _ in range(min(asked, count)):
        link.read(tickets.pop().get())
        link.compute(layer_ms)
    tickets.clear()
    link.run()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramx.compression.offload.budget._TIMED_BYTES", 1)


@pytest.mark.parametrize(
    ("copy_ms", "expected"),
    [
        (0.5, 8),  # the link is faster than the layers
        (2.0, 3),  # from the first put to the end of forward there are 7 ms: 3.5, less the margin
        (8.0, 1),  # one
    ],
)
@pytest.mark.usefixtures("timed")
def test_cpu_moves_what_the_link_hides(copy_ms: float, expected: int) -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / copy_ms
    stash = stash_on(link, "cpu")
    for _ in range(4):
        timed_step(link, stash, layer_ms=1.0)
    before = stash.moved_bytes
    timed_step(link, stash, layer_ms=1.0)
    assert (stash.moved_bytes - before) // BLOCK_BYTES == expected


@pytest.mark.usefixtures("timed")
def test_cpu_spreads_what_leaves_over_the_step() -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 2.0
    stash = stash_on(link, "cpu")
    for _ in range(4):
        timed_step(link, stash, layer_ms=1.0)
    left = [state is not State.RESIDENT for state in states(forward(link, stash))]
    assert left == [True, False, False, False, True, False, False, True]


@pytest.mark.usefixtures("timed")
def test_the_report_tells_bandwidth_and_what_was_hidden() -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 2.0
    stash = stash_on(link, 1.0)
    for _ in range(3):
        timed_step(link, stash, layer_ms=1.0)
    report = offload.report_of(torch.device("cuda", 0), stash)
    assert report.to_host_bytes_per_s == pytest.approx(1e3 * link.bytes_per_ms)
    assert report.to_device_bytes_per_s == pytest.approx(1e3 * link.bytes_per_ms)
    # Copies take 16 ms each way. Out, all but the window's 4 end in 12, when the last put is in its
    # eighth; back, the last 2 of 8 are asked for in the first of 7 ms of backward.
    assert report.hidden_measured == pytest.approx(1 - 13 / 32)
    assert report.hidden_predicted == pytest.approx(report.hidden_measured)
    assert report.moved_bytes == 24 * BLOCK_BYTES
    assert "hidden" in str(report)


def test_a_step_on_two_streams_is_measured_once_both_are_done() -> None:
    link = FakeLink()
    budget = Budget("cpu", link)
    budget.put(1, sequence=1)
    budget.begin_get(budget.step, sequence=1, gets=0, nbytes=1)
    link.current = link.other
    before = link.mark(link.current, timed=True)
    link.compute(3.0)
    budget.waited(before, link.mark(link.current, timed=True))
    link.current = link.main
    budget.end_get()
    budget.get(budget.step)
    while link.main.step():
        pass
    for is_measured in (False, True):
        budget.put(1, sequence=2)
        budget.get(budget.step)
        assert (budget.measured.waited_ms == 3.0) is is_measured
        link.run()


@pytest.mark.parametrize(
    "last",
    [
        {"layer_ms": 3.0},  # another program ran beside it
        {"count": 1},  # from whose put to its get no time passes
        {"count": 6},
        {"asked": 1},
        {"asked": 5},
    ],
    ids=["disturbed", "of one tensor", "shorter", "broken off at once", "broken off later"],
)
@pytest.mark.usefixtures("timed")
def test_an_unusual_step_does_not_change_what_leaves_of_a_usual_one(last: dict[str, Any]) -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 2.0
    stash = stash_on(link, "cpu")
    usual: dict[str, Any] = {"layer_ms": 1.0, "count": 8}
    for changes in ({}, {}, {}, last):
        timed_step(link, stash, **{**usual, **changes})
    before = stash.moved_bytes
    timed_step(link, stash, **usual)
    assert (stash.moved_bytes - before) // BLOCK_BYTES == 3
