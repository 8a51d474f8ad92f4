"""What of an offload's copies compute is expected to hide, against what a device then measures.

The device is a FakeLink with a clock; the program is a stack of layers, each a long computation
that makes few bytes and a short one that makes many, as attention and the feed-forward part of a
transformer are. What such bursts cost depends on their place in the step, on the window and on the
order of copies: a forecast from sums of bytes and of times would not see it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_link import BLOCK_BYTES, FakeLink
from offload_tools import stash_on

from vramx.compression.offload import forecast, offload
from vramx.compression.offload.budget import Measured, Moment
from vramx.compression.offload.stash import Stash

# Of one layer: milliseconds of compute, and the bytes of what it makes then.
ATTENTION, FEED_FORWARD = (3.0, BLOCK_BYTES // 8), (0.2, BLOCK_BYTES)
LAYER = (ATTENTION, FEED_FORWARD, FEED_FORWARD, FEED_FORWARD)
LAYERS = 4
STEPS = 5


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramx.compression.offload.budget._TIMED_BYTES", 1)


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
def test_what_is_forecast_is_what_is_measured(
    share: str | float, copy_ms: float, backward_factor: float
) -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / copy_ms
    report = measured_on(link, stash_on(link, share), backward_factor)
    assert report.hidden_predicted == pytest.approx(report.hidden_measured)


def test_bursts_are_seen() -> None:
    """The same bytes and milliseconds, evenly spread, would be hidden."""
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 1.0
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


def test_a_program_may_ask_while_it_only_infers() -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 1.0
    stash = stash_on(link)
    report = measured_on(link, stash)
    with torch.inference_mode():
        assert offload.report_of(report.device, stash) == report


def test_nothing_is_forecast_of_what_was_not_measured() -> None:
    assert forecast.hidden_part(Measured(), 1.0, BLOCK_BYTES) is None
    one_way = Measured(moments=(Moment(0.0, 1, 8), Moment(1.0, 1, None)))
    assert forecast.hidden_part(one_way, 1.0, BLOCK_BYTES) is None


def test_buffers_that_nobody_asked_for_are_dropped_at_the_end_of_a_step() -> None:
    link = FakeLink()
    link.bytes_per_ms = BLOCK_BYTES / 1.0
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
