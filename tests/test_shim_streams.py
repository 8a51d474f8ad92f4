"""torch's shim tells the core what torch knows of streams."""

from __future__ import annotations

from shim_build import FOREIGN_STREAM, MIB, POOL, SIDE_STREAM, STREAM, Bench
from shim_process import before_installing


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


@before_installing
def test_a_device_is_capturing_while_a_graph_or_a_pool_is_filled_on_it(bench: Bench) -> None:
    recording(bench)
    assert not bench.is_capturing(0)
    bench.begin_pool(0, POOL, SIDE_STREAM)
    assert bench.is_capturing(0)
    assert not bench.is_capturing(1)
    bench.end_pool(0, POOL)
    assert not bench.is_capturing(0)
