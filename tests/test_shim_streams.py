"""torch's shim tells the core what torch knows of streams."""

from __future__ import annotations

import threading
import time

import pytest
from shim_build import FOREIGN_STREAM, MIB, POOL, SIDE_STREAM, STREAM, Bench
from shim_process import before_installing, on_another_thread

LONGEST_CALL_S = 0.1  # for which a capture waits
LONGEST_START_S = 1.0  # after which a capture has failed to begin


def recording(bench: Bench) -> None:
    """Install the shim over a core that notes what it is told of streams."""
    assert bench.install(bench.recording_core()) == ""
    bench.init(2)


@before_installing
def test_a_recorded_stream_comes_with_its_device_and_whether_it_lasts(bench: Bench) -> None:
    recording(bench)
    bench.device(1)
    block = bench.allocate(MIB)
    for stream in (STREAM, SIDE_STREAM, FOREIGN_STREAM):
        bench.record_stream(block, stream)
    assert bench.recorded() == [
        f"stream {STREAM} of device 1, lasting",
        f"stream {SIDE_STREAM} of device 1, lasting",
        f"stream {FOREIGN_STREAM} of device 1",
    ]


@before_installing
def test_streams_of_torchs_pool_and_the_default_one_last(bench: Bench) -> None:
    recording(bench)
    assert bench.is_lasting(STREAM, 0)
    bench.stream(SIDE_STREAM)
    assert bench.is_lasting(SIDE_STREAM, 0)
    assert bench.is_lasting(STREAM, 0)
    bench.stream(FOREIGN_STREAM)
    assert not bench.is_lasting(FOREIGN_STREAM, 0)


@before_installing
def test_a_stream_that_is_not_current_is_not_known_to_last(bench: Bench) -> None:
    recording(bench)
    bench.stream(SIDE_STREAM)
    assert not bench.is_lasting(SIDE_STREAM + 2, 0)


@before_installing
def test_the_current_stream_is_the_one_that_the_thread_works_on(bench: Bench) -> None:
    recording(bench)
    bench.stream(FOREIGN_STREAM)
    assert bench.is_current(FOREIGN_STREAM, 0)
    assert not bench.is_current(STREAM, 0)


def may_call(bench: Bench, stream: int | None, device: int = 0) -> bool:
    """Say whether a call may be made now on a stream, or for the device as a whole."""
    may_be_made = bool(
        bench.begin_device_call(device) if stream is None else bench.begin_call(stream, device)
    )
    if may_be_made:
        bench.end_call(device)
    return may_be_made


@before_installing
def test_a_device_is_left_alone_while_a_graph_or_a_pool_is_filled_on_it(bench: Bench) -> None:
    recording(bench)
    assert may_call(bench, None)
    bench.begin_pool(0, POOL, STREAM)
    assert not may_call(bench, None)
    assert may_call(bench, None, 1)
    assert may_call(bench, SIDE_STREAM)  # no graph is captured
    bench.end_pool(0, POOL)
    assert may_call(bench, None)


@before_installing
def test_a_stream_of_another_thread_is_left_alone_from_before_a_capture_begins(
    bench: Bench,
) -> None:
    recording(bench)
    bench.stream(SIDE_STREAM)
    bench.begin_pool(0, POOL, FOREIGN_STREAM)  # as torch does before it captures the current one
    bench.stream(STREAM)
    found: list[bool] = []

    def look() -> None:
        found.extend(may_call(bench, each) for each in (SIDE_STREAM, SIDE_STREAM + 2, STREAM, None))
        found.append(may_call(bench, SIDE_STREAM, 1))

    on_another_thread(look)
    assert found == [False, False, True, False, True]
    time.sleep(LONGEST_START_S)
    on_another_thread(look)
    assert found[5:] == [True, True, True, False, True]
    bench.end_pool(0, POOL)
    assert may_call(bench, SIDE_STREAM)


@before_installing
@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_begins_once_no_call_is_under_way_or_has_begun(bench: Bench, ends: bool) -> None:
    """A call that goes on for long has been looked at by the driver."""
    recording(bench)
    assert bench.begin_device_call(0)
    bench.stream(SIDE_STREAM)
    began_s = time.monotonic()
    over_s: list[float] = []

    def capture() -> None:
        bench.begin_pool(0, POOL, FOREIGN_STREAM)
        over_s.append(time.monotonic())

    thread = threading.Thread(target=capture)
    thread.start()
    while may_call(bench, None):  # until the capture is known
        time.sleep(0.001)
    ended_s = began_s + LONGEST_CALL_S
    if ends:
        time.sleep(0.01)
        ended_s = min(ended_s, time.monotonic())
        bench.end_call(0)
    thread.join()
    assert over_s[0] >= ended_s
