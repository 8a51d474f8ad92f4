"""torch's shim reports the peak of both allocators together, at no cost for the core's calls."""

from __future__ import annotations

from shim_build import MIB, PEAK, POOL, SIDE_STREAM, Bench, in_pool, stat, try_install
from shim_process import before_installing, in_own_process


def installed_late(bench: Bench, held_before_bytes: int) -> int:
    """Install the shim over an allocator that is in use, and return the block that it has."""
    bench.init(2)
    old = int(bench.native_allocate(held_before_bytes))
    assert try_install(bench, late=True) == ""
    return old


# --- what is reported ----------------------------------------------------------------------------


@in_own_process
def test_the_peak_is_that_of_the_sum(bench: Bench) -> None:
    bench.free(bench.allocate(10 * MIB))
    pooled = in_pool(bench, 4 * MIB)  # the core's peak is over: 4 now, 10 before
    assert stat(bench, "allocated_bytes")[PEAK] == 10 * MIB
    core = bench.allocate(8 * MIB)  # 12 together
    bench.free(core)
    bench.free(pooled)
    bench.allocate(MIB)
    assert stat(bench, "allocated_bytes")[:2] == [MIB, 12 * MIB]
    bench.reset_peaks(0)
    assert stat(bench, "allocated_bytes")[:2] == [MIB, MIB]


@in_own_process
def test_a_peak_between_two_looks_is_seen_in_every_statistic(bench: Bench) -> None:
    in_pool(bench, 4 * MIB)
    blocks = [bench.allocate(2 * MIB) for _ in range(3)]
    for block in blocks:
        bench.free(block)
    assert stat(bench, "allocation")[:2] == [1, 4]
    assert stat(bench, "requested_bytes")[:2] == [4 * MIB, 10 * MIB]
    assert stat(bench, "reserved_bytes")[:2] == [10 * MIB, 10 * MIB]


@in_own_process
def test_what_torch_held_in_the_past_is_not_added_to_a_later_peak(bench: Bench) -> None:
    bench.free(in_pool(bench, 8 * MIB))
    bench.allocate(6 * MIB)
    assert stat(bench, "allocated_bytes")[:2] == [6 * MIB, 8 * MIB]


@in_own_process
def test_peaks_that_were_reset_forget_what_pools_held(bench: Bench) -> None:
    bench.free(in_pool(bench, 8 * MIB))
    bench.reset_peaks(0)
    bench.allocate(MIB)
    assert stat(bench, "allocated_bytes")[:2] == [MIB, MIB]


@in_own_process
def test_the_cores_own_peak_is_left_alone(bench: Bench) -> None:
    bench.free(bench.allocate(10 * MIB))
    in_pool(bench, 4 * MIB)
    bench.stats(0)
    bench.allocate(MIB)
    assert bench.devices.stats(0)["allocated_bytes"]["all"]["peak"] == 10 * MIB


@before_installing
def test_tensors_from_before_a_late_install_do_not_raise_later_peaks(bench: Bench) -> None:
    old = installed_late(bench, 6 * MIB)
    bench.native_free(old)
    bench.allocate(5 * MIB)
    assert stat(bench, "allocated_bytes")[:2] == [5 * MIB, 6 * MIB]


@before_installing
def test_a_peak_after_a_late_install_is_that_of_the_sum(bench: Bench) -> None:
    old = installed_late(bench, 6 * MIB)
    bench.free(bench.allocate(5 * MIB))
    bench.native_free(old)
    bench.allocate(MIB)
    assert stat(bench, "allocated_bytes")[:2] == [MIB, 11 * MIB]


# --- what it costs -------------------------------------------------------------------------------


@in_own_process
def test_beside_a_pool_that_is_alive_torch_is_asked_nothing(bench: Bench) -> None:
    in_pool(bench, 4 * MIB)
    before = bench.native_stats_reads()
    for block in [bench.allocate(MIB) for _ in range(20)]:  # each is a new peak
        bench.free(block)
    assert bench.native_stats_reads() == before


@before_installing
def test_after_the_last_older_tensor_torch_is_asked_nothing(bench: Bench) -> None:
    old = installed_late(bench, MIB)
    bench.allocate(MIB)
    bench.free(old)
    before = bench.native_stats_reads()
    for _ in range(20):
        bench.allocate(MIB)
    assert bench.native_stats_reads() == before


@before_installing
def test_a_free_beside_a_pool_is_one_call_of_the_core(bench: Bench) -> None:
    assert bench.install(bench.recording_core()) == ""
    bench.init(2)
    bench.begin_pool(0, POOL, SIDE_STREAM)
    bench.free(bench.allocate(512))
    assert bench.finds() == 0
