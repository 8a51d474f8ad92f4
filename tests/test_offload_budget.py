"""What offloading moves, when, and what the link hides of it: measured, and forecast.

Of a fraction the oldest leave first. "cpu" moves what the link can copy while layers compute, as
measured in earlier steps, and spreads that over the step; the report tells bandwidth and what was
hidden. Time is a FakeLink's, which counts it: nothing here depends on the machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_link import BLOCK_BYTES, FakeLink
from offload_tools import copying_in, forward, link, moved_in_a_step, stash_on, states, timed

from vramx.compression.offload import forecast, offload
from vramx.compression.offload.budget import Budget, Measured, Moment
from vramx.compression.offload.parcel import State
from vramx.compression.offload.stash import Stash

__all__ = ["link", "timed"]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.5, 4), (0.25, 2), (1.0, 8)])
def test_a_fraction_of_the_bytes_leaves_the_oldest_first(
    share: float, expected: int, link: FakeLink
) -> None:
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
    link = copying_in(copy_ms)
    stash = stash_on(link, "cpu")
    for _ in range(4):
        timed_step(link, stash, layer_ms=1.0)
    before = stash.moved_bytes
    timed_step(link, stash, layer_ms=1.0)
    assert (stash.moved_bytes - before) // BLOCK_BYTES == expected


@pytest.mark.usefixtures("timed")
def test_cpu_spreads_what_leaves_over_the_step() -> None:
    link = copying_in(2.0)
    stash = stash_on(link, "cpu")
    for _ in range(4):
        timed_step(link, stash, layer_ms=1.0)
    left = [state is not State.RESIDENT for state in states(forward(link, stash))]
    assert left == [True, False, False, False, True, False, False, True]


@pytest.mark.usefixtures("timed")
def test_the_report_tells_bandwidth_and_what_was_hidden() -> None:
    link = copying_in(2.0)
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


def test_a_step_on_two_streams_is_measured_once_both_are_done(link: FakeLink) -> None:
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
    link = copying_in(2.0)
    stash = stash_on(link, "cpu")
    usual: dict[str, Any] = {"layer_ms": 1.0, "count": 8}
    for changes in ({}, {}, {}, last):
        timed_step(link, stash, **{**usual, **changes})
    before = stash.moved_bytes
    timed_step(link, stash, **usual)
    assert (stash.moved_bytes - before) // BLOCK_BYTES == 3


# What of the copies compute is expected to hide, against what a device then measures. The program
# is a stack of layers, each a long computation that makes few bytes and a short one that makes
# many, as attention and the feed-forward part of a transformer are. What such bursts cost depends
# on their place in the step, on the window and on the order of copies: a forecast from sums of
# bytes and of times would not see it.

# Of one layer: milliseconds of compute, and the bytes of what it makes then.
ATTENTION, FEED_FORWARD = (3.0, BLOCK_BYTES // 8), (0.2, BLOCK_BYTES)
LAYER = (ATTENTION, FEED_FORWARD, FEED_FORWARD, FEED_FORWARD)
LAYERS = 4
STEPS = 5


def take_step(link: FakeLink, stash: Stash, backward_factor: float) -> None:
    tickets = []
    for milliseconds, nbytes in LAYER * LAYERS:
        link.compute(milliseconds)
        tickets.append((stash.put(link.produce(1, nbytes)), milliseconds))
    while tickets:
        ticket, milliseconds = tickets.pop()
        link.read(ticket.get())
        link.compute(backward_factor * milliseconds)
    link.run()


def measured_on(
    link: FakeLink, stash: Stash, backward_factor: float = 2.0
) -> offload.OffloadReport:
    for _ in range(STEPS):
        take_step(link, stash, backward_factor)
    return offload.report_of(torch.device("cuda", 0), stash)


@pytest.mark.parametrize("copy_ms", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, "cpu"])
@pytest.mark.parametrize("backward_factor", [1.0, 2.0])
@pytest.mark.usefixtures("timed")
def test_what_is_forecast_is_what_is_measured(
    share: str | float, copy_ms: float, backward_factor: float
) -> None:
    link = copying_in(copy_ms)
    report = measured_on(link, stash_on(link, share), backward_factor)
    assert report.hidden_predicted == pytest.approx(report.hidden_measured)


@pytest.mark.usefixtures("timed")
def test_bursts_are_seen() -> None:
    """The same bytes and milliseconds, evenly spread, would be hidden."""
    link = copying_in(1.0)
    stash = stash_on(link)
    report = measured_on(link, stash, backward_factor=1.5)
    measured = stash.budget.measured
    evenly = evened_out(measured)
    assert report.hidden_measured < 0.9
    assert forecast.hidden_part(evenly, 1.0, 2 * BLOCK_BYTES) > 0.95


def evened_out(measured: Measured) -> Measured:
    """Return the step with all puts as large as each other and as far apart; so with its gets."""
    puts = [moment for moment in measured.moments if moment.nbytes is not None]
    mean = sum(moment.nbytes or 0 for moment in puts) // len(puts)
    forward_ms, backward_ms = measured.forward_ms or 0.0, measured.backward_ms or 0.0
    moments = []
    for i, moment in enumerate(measured.moments):
        if moment.nbytes is not None:
            at_ms = forward_ms * (i + 1) / len(puts)
        else:
            at_ms = forward_ms + backward_ms * (i - len(puts)) / len(puts)
        moments.append(moment._replace(computed_ms=at_ms, nbytes=moment.nbytes and mean))
    return replace(measured, moments=tuple(moments))


@pytest.mark.usefixtures("timed")
def test_a_program_may_ask_while_it_only_infers() -> None:
    link = copying_in(1.0)
    stash = stash_on(link)
    report = measured_on(link, stash)
    with torch.inference_mode():
        assert offload.report_of(report.device, stash) == report


def test_nothing_is_forecast_of_what_was_not_measured() -> None:
    assert forecast.hidden_part(Measured(), 1.0, BLOCK_BYTES) is None
    one_way = Measured(moments=(Moment(0.0, 1, 8), Moment(1.0, 1, None)))
    assert forecast.hidden_part(one_way, 1.0, BLOCK_BYTES) is None


@pytest.mark.usefixtures("timed")
def test_buffers_that_nobody_asked_for_are_dropped_at_the_end_of_a_step() -> None:
    link = copying_in(1.0)
    stash = stash_on(link)
    for _ in range(STEPS):
        kept = [stash.put(link.produce(value)) for value in range(6)]
        link.compute(4.0)
        while len(kept) > 2:
            link.read(kept.pop().get())
            link.compute(1.0)
        kept.clear()
        link.compute(4.0)
        link.run()
    report = offload.report_of(torch.device("cuda", 0), stash)
    assert report.hidden_predicted == pytest.approx(report.hidden_measured)


@pytest.mark.usefixtures("timed")
def test_a_step_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that keeps all that it saves must not gather events for ever."""
    monkeypatch.setattr("vramx.compression.offload.budget._MOST_CALLS", 4)
    link = FakeLink(blocks=256)
    stash = stash_on(link, 1.0)
    kept = [stash.put(link.produce(1)) for _ in range(4)]
    assert stash.budget.measures
    kept += [stash.put(link.produce(1)) for _ in range(8)]
    assert not stash.budget.measures
    while kept:
        link.read(kept.pop().get())
    link.run()
    stash.check()
