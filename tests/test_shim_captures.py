"""torch's shim gets over a graph capture that has failed, of whose end torch tells it nothing."""

from __future__ import annotations

from shim_build import FOREIGN_STREAM, MIB, POOL, SIDE_STREAM, STREAM, Bench, try_install
from shim_process import before_installing, in_own_process, on_another_thread

OWN = 5  # the number of a graph's own pool
MANY = 16  # requests, after which captures have been looked at in any case


def fail_a_capture(bench: Bench, own: int = OWN, named: int = 0, stream: int = SIDE_STREAM) -> None:
    """Do what torch up to 2.12 does where something illegal happens in a capture."""
    bench.stream(stream)
    bench.capture_begin(0, own, named)
    bench.allocate(512)
    bench.capture_invalidate(stream)
    bench.capture_stop(stream)
    bench.stream(STREAM)


def releases_for_torch(bench: Bench) -> bool:
    major, minor, *_ = bench.shim.vramx_torch_built_for().decode().split(".")
    return (int(major), int(minor)) < (2, 14)


def is_ended(bench: Bench, own: int = OWN) -> bool:
    """Say whether torch was told of the end of a graph's capture, since the journal was read."""
    return f"end graph {own}" in bench.journal()


# --- a capture that failed -----------------------------------------------------------------------


@in_own_process
def test_empty_cache_after_a_failed_capture_gives_everything_back(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    fail_a_capture(bench)
    bench.empty_cache(0)
    assert bench.devices.held(0) == 0


@in_own_process
def test_after_a_failed_capture_torch_is_told_its_end(bench: Bench) -> None:
    fail_a_capture(bench)
    bench.journal()
    bench.empty_cache(0)
    release = [f"release graph {OWN}"] if releases_for_torch(bench) else []
    assert bench.journal() == [f"end graph {OWN}", *release, "empty cache 0,0"]


@in_own_process
def test_an_eager_program_notices_by_itself(bench: Bench) -> None:
    fail_a_capture(bench)
    assert not is_ended(bench)
    for _ in range(MANY):
        bench.allocate(512)
    assert is_ended(bench)


@in_own_process(capacity_bytes=64 * MIB)
def test_the_core_in_need_empties_torchs_cache_after_a_failed_capture(bench: Bench) -> None:
    bench.set_fraction(64 / 1024, 0)
    fail_a_capture(bench)
    bench.begin_pool(0, POOL, STREAM)
    bench.free(bench.allocate(32 * MIB))
    bench.end_pool(0, POOL)
    bench.journal()
    bench.allocate(48 * MIB)
    assert "empty cache 0,0" in bench.journal()


@in_own_process
def test_a_capture_that_could_not_begin_is_over(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.stream(SIDE_STREAM)
    bench.capture_begin(0, OWN, 0)
    bench.capture_stop(SIDE_STREAM)  # nothing was seen of it
    bench.empty_cache(0)
    assert bench.devices.held(0) == 0


@in_own_process
def test_another_thread_gets_over_a_capture_that_it_saw(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.stream(SIDE_STREAM)
    bench.capture_begin(0, OWN, 0)
    bench.allocate(512)
    bench.capture_stop(SIDE_STREAM)
    bench.journal()
    on_another_thread(lambda: bench.empty_cache(0))
    assert bench.devices.held(0) == 0
    # It may have come between the two steps of an end that did not fail.
    assert bench.journal() == [f"end graph {OWN}", "empty cache 0,0"]


@in_own_process
def test_the_next_capture_on_the_stream_begins_without_the_failed_one(bench: Bench) -> None:
    on_another_thread(lambda: fail_a_capture(bench))
    bench.stream(SIDE_STREAM)
    bench.journal()
    bench.capture_begin(0, OWN + 1, 0)
    assert bench.journal()[0] == f"end graph {OWN}"
    bench.capture_tell_end(0, OWN + 1, 0)
    assert is_ended(bench, OWN + 1)


@in_own_process
def test_an_end_that_is_told_after_all_is_not_told_twice(bench: Bench) -> None:
    fail_a_capture(bench)
    bench.empty_cache(0)
    bench.journal()
    bench.capture_tell_end(0, OWN, 0)
    assert bench.journal() == []


@in_own_process
def test_a_pool_that_was_named_may_be_named_again(bench: Bench) -> None:
    fail_a_capture(bench, own=0, named=POOL)
    bench.empty_cache(0)
    fail_a_capture(bench, own=0, named=POOL)  # torch refuses a pool that nobody has a share in
    bench.empty_cache(0)
    expected = 1 if releases_for_torch(bench) else 2
    assert bench.pool_use_count(POOL) == expected


# --- a capture that has not failed ---------------------------------------------------------------


@in_own_process
def test_a_capture_that_is_under_way_stays(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.stream(SIDE_STREAM)
    bench.capture_begin(0, OWN, 0)
    before = bench.devices.allocated(0)
    for _ in range(2 * MANY):
        bench.allocate(512)
    bench.empty_cache(0)
    assert bench.devices.allocated(0) == before
    assert bench.devices.held(0) == 64 * MIB


@in_own_process
def test_an_invalidated_capture_stays_until_its_end(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.stream(SIDE_STREAM)
    bench.capture_begin(0, OWN, 0)
    bench.capture_invalidate(SIDE_STREAM)
    bench.empty_cache(0)  # would wait for a device that is capturing
    assert bench.devices.held(0) == 64 * MIB


@in_own_process
def test_a_capture_about_to_begin_on_another_thread_stays(bench: Bench) -> None:

    def begin() -> None:
        bench.stream(SIDE_STREAM)
        bench.capture_begin(0, OWN, 0)
        bench.capture_stop(SIDE_STREAM)  # as it is between torch's two steps
        bench.stream(STREAM)

    on_another_thread(begin)
    bench.empty_cache(0)
    assert not is_ended(bench)


@in_own_process
def test_a_capture_on_another_librarys_stream_is_asked_only_where_it_is_current(
    bench: Bench,
) -> None:
    fail_a_capture(bench, stream=FOREIGN_STREAM)
    bench.empty_cache(0)
    assert not is_ended(bench)
    bench.stream(FOREIGN_STREAM)
    bench.empty_cache(0)
    assert is_ended(bench)


@in_own_process
def test_nested_pools_of_a_thread_stay_until_their_ends(bench: Bench) -> None:
    bench.stream(SIDE_STREAM)
    bench.begin_pool(0, POOL, SIDE_STREAM)
    bench.begin_pool(0, POOL + 1, SIDE_STREAM)
    for _ in range(2 * MANY):
        bench.empty_cache(0)
    bench.end_pool(0, POOL + 1)
    bench.journal()
    bench.allocate(512)
    assert bench.journal() == ["allocate 512"]
    bench.end_pool(0, POOL)
    bench.journal()
    bench.allocate(512)
    assert bench.journal() == []


@in_own_process
def test_a_pool_inside_a_failed_capture_stays_until_its_end(bench: Bench) -> None:
    bench.stream(SIDE_STREAM)
    bench.capture_begin(0, OWN, 0)
    bench.begin_pool(0, POOL, SIDE_STREAM)
    bench.capture_stop(SIDE_STREAM)
    bench.empty_cache(0)
    bench.journal()
    bench.allocate(512)
    assert bench.journal() == ["allocate 512"]
    bench.end_pool(0, POOL)
    assert bench.journal() == [f"end {POOL}"]


@before_installing
def test_a_capture_from_before_a_late_install_is_ended_by_torch(bench: Bench) -> None:
    bench.init(2)
    bench.begin_pool(0, POOL, SIDE_STREAM)
    assert try_install(bench, late=True) == ""
    bench.journal()
    bench.end_pool(0, POOL)
    assert bench.journal() == [f"end {POOL}"]
