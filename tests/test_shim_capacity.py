"""torch's shim bounds the core and torch's allocator together; in need each helps the other out."""

from __future__ import annotations

from shim_build import (
    CURRENT,
    MIB,
    NO_LIMIT,
    POOL,
    SIDE_STREAM,
    STREAM,
    Bench,
    in_pool,
    raises,
    stat,
    try_install,
)
from shim_process import before_installing, from_torch, in_own_process

# --- limits --------------------------------------------------------------------------------------


@in_own_process
def test_a_fraction_bounds_both_together(bench: Bench) -> None:
    bench.set_fraction(0.25, 0)  # of 1 GiB
    assert bench.fraction(0) == 0.25
    bench.allocate(100 * MIB)
    in_pool(bench, 100 * MIB)
    assert bench.native_fraction(0) == (256 - 100) / 1024
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(100 * MIB)
    with raises("OutOfMemoryError: CUDA out of memory. (native)"):
        in_pool(bench, 57 * MIB)
    bench.allocate(56 * MIB)


@in_own_process
def test_a_lifted_limit_is_lifted_on_both_sides(bench: Bench) -> None:
    bench.set_fraction(0.1, 0)
    bench.set_fraction(1.0, 0)
    assert bench.fraction(0) == 1.0
    assert bench.native_fraction(0) == 1.0
    bench.allocate(512 * MIB)


@in_own_process
def test_a_programs_fraction_does_not_lift_the_limit_that_it_runs_under(bench: Bench) -> None:
    bench.make_context(0)
    bench.set_limit(0, 256 * MIB)
    for fraction in (0.5, 1.0):
        bench.set_fraction(fraction, 0)
        assert [bench.fraction(0), bench.native_fraction(0)] == [0.25, 0.25]
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(257 * MIB)


@in_own_process
def test_the_lower_of_limit_and_fraction_holds_and_either_is_lifted_alone(bench: Bench) -> None:
    bench.set_limit(-1, 512 * MIB)
    bench.set_fraction(0.25, 0)
    assert [bench.fraction(0), bench.fraction(1)] == [0.25, 0.5]
    bench.set_limit(0, NO_LIMIT)
    assert bench.fraction(0) == 0.25
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(257 * MIB)
    bench.set_fraction(1.0, 0)
    assert [bench.fraction(0), bench.native_fraction(0)] == [1.0, 1.0]
    bench.allocate(257 * MIB)


@in_own_process
def test_without_a_limit_torchs_allocator_is_told_of_none(bench: Bench) -> None:
    bench.make_context(0)
    bench.set_fraction(1.0, 0)
    bench.set_limit(-1, NO_LIMIT)
    assert bench.native_fractions_set() == 0
    bench.set_limit(0, 256 * MIB)
    bench.set_limit(-1, NO_LIMIT)
    assert [bench.native_fractions_set(), bench.native_fraction(0)] == [2, 1.0]


@in_own_process
def test_a_fraction_that_is_none_is_refused(bench: Bench) -> None:
    with raises("Error: invalid fraction"):
        bench.set_fraction(1.5, 0)
    with raises("Error: invalid fraction"):
        bench.set_fraction(float("nan"), 0)
    assert bench.fraction(0) == 1.0


@before_installing
def test_a_limit_set_before_cuda_starts_holds_afterwards(bench: Bench) -> None:
    assert try_install(bench) == ""
    bench.set_limit(-1, 256 * MIB)
    bench.make_context(1)
    bench.init(2)
    assert [bench.fraction(0), bench.fraction(1)] == [0.25, 0.25]
    assert bench.native_fraction(1) == 0.25
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(257 * MIB)
    bench.set_limit(0, NO_LIMIT)
    bench.allocate(257 * MIB)


@before_installing
def test_a_limit_from_before_a_late_install_is_kept(bench: Bench) -> None:
    bench.init(2)
    bench.set_native_fraction(0.25, 0)
    assert try_install(bench, late=True) == ""
    assert bench.fraction(0) == 0.25
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(257 * MIB)


@before_installing
def test_the_current_device_stays_where_torch_makes_another_current_to_be_bounded(
    bench: Bench,
) -> None:
    bench.fractions_make_current()
    bench.init(2)
    for device in (0, 1):
        bench.make_context(device)
    assert try_install(bench, late=True) == ""
    assert bench.current_device() == 0
    bench.set_limit(-1, 256 * MIB)
    bench.set_fraction(0.125, 1)
    bench.set_limit(-1, NO_LIMIT)
    assert [bench.native_fraction(0), bench.native_fraction(1)] == [1.0, 0.125]
    assert bench.current_device() == 0


@before_installing
def test_a_limit_makes_no_context_and_holds_for_the_first_that_a_pool_takes(bench: Bench) -> None:
    bench.rename_native("cudaMallocAsync")  # which makes one to be asked or told
    assert try_install(bench) == ""
    bench.set_limit(-1, 256 * MIB)
    bench.init(2)
    bench.set_limit(-1, 128 * MIB)
    bench.set_fraction(0.5, 1)
    assert bench.contexts() == 0
    with raises("OutOfMemoryError: CUDA out of memory. (native)"):
        in_pool(bench, 129 * MIB)
    in_pool(bench, 128 * MIB)
    assert [bench.native_fraction(0), bench.native_fraction(1)] == [0.125, 1.0]
    assert bench.contexts() == 1
    bench.set_limit(-1, NO_LIMIT)
    assert [bench.native_fraction(0), bench.contexts()] == [1.0, 1]


@in_own_process(capacity_bytes=512 * MIB)
def test_cache_info_is_what_could_be_had(bench: Bench) -> None:
    assert bench.cache_info(0) == 1024 * MIB  # not started: what CUDA has free
    assert bench.journal() == ["cache info"]
    bench.allocate(100 * MIB)
    assert bench.cache_info(0) == 412 * MIB
    bench.begin_pool(0, POOL, STREAM)
    assert bench.cache_info(0) == 1024 * MIB


# --- giving back, and the end --------------------------------------------------------------------


@in_own_process
def test_empty_cache_empties_both(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.free(in_pool(bench, MIB))
    bench.journal()
    bench.empty_cache(0)
    assert bench.devices.held(0) == 0
    assert bench.journal() == ["empty cache 0,0"]
    assert stat(bench, "reserved_bytes")[CURRENT] == 0


@from_torch(8)
@in_own_process
def test_empty_cache_of_a_pool_leaves_the_core_alone(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.empty_cache(POOL)
    assert bench.devices.held(0) == 64 * MIB
    assert bench.journal() == [f"empty cache 0,{POOL}"]


@in_own_process
def test_empty_cache_does_not_wait_while_a_graph_is_captured(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.begin_pool(0, POOL, SIDE_STREAM)
    bench.empty_cache(0)
    assert bench.devices.held(0) == 64 * MIB


@in_own_process(capacity_bytes=64 * MIB)
def test_out_of_memory_is_torchs_error_and_counted_once(bench: Bench) -> None:
    bench.memory(48 * MIB, 64 * MIB)
    bench.attach_observer()
    bench.allocate(16 * MIB)
    with raises("OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB") as texts:
        bench.allocate(64 * MIB)
    assert "torch's own allocator" not in texts[0]
    assert bench.observed() == [[0, 64 * MIB, 64 * MIB, 48 * MIB]]
    assert bench.stats(0)["num_ooms"] == 1
    bench.allocate(16 * MIB)  # the program goes on


@in_own_process(capacity_bytes=64 * MIB)
def test_out_of_memory_says_what_pools_hold(bench: Bench) -> None:
    in_pool(bench, 8 * MIB)
    with raises("OutOfMemoryError: CUDA out of memory.") as texts:
        bench.allocate(128 * MIB)
    assert "holds 8.00 MiB, of which 8.00 MiB is live" in texts[0]


@in_own_process(capacity_bytes=64 * MIB)
def test_an_observer_may_wait_for_a_snapshot_and_an_allocation_of_another_thread(
    bench: Bench,
) -> None:
    bench.attach_waiting_observer()
    kept = [bench.allocate(16 * MIB)]
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(64 * MIB)
    ((device, segments),) = bench.observed()
    assert device == 0
    assert segments >= 1
    bench.free(kept.pop())


@in_own_process
def test_torchs_observers_hear_of_torchs_failures_once(bench: Bench) -> None:
    bench.attach_observer()
    bench.memory(MIB, 64 * MIB)
    with raises("OutOfMemoryError: CUDA out of memory. (native)"):
        in_pool(bench, 2 * MIB)
    assert len(bench.observed()) == 1


@in_own_process(capacity_bytes=64 * MIB)
def test_an_earlier_error_of_the_device_is_not_called_out_of_memory(bench: Bench) -> None:
    bench.broken(True)
    with raises("Error: CUDA error"):
        bench.allocate(128 * MIB)


@in_own_process(capacity_bytes=64 * MIB)
def test_the_core_in_need_empties_torchs_cache(bench: Bench) -> None:
    bench.set_fraction(64 / 1024, 0)
    bench.free(in_pool(bench, 32 * MIB))
    bench.journal()
    bench.allocate(48 * MIB)  # fits only without what torch's allocator keeps
    assert bench.journal() == ["empty cache 0,0"]


@in_own_process(capacity_bytes=64 * MIB)
def test_the_core_in_need_leaves_a_cache_that_a_graph_is_using(bench: Bench) -> None:
    bench.free(in_pool(bench, 32 * MIB))
    bench.begin_pool(0, POOL, SIDE_STREAM)
    bench.journal()
    with raises("OutOfMemoryError: CUDA out of memory."):
        bench.allocate(128 * MIB)
    assert bench.journal() == []


@in_own_process
def test_torch_in_need_gets_what_the_core_has_unused(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    in_pool(bench, MIB)  # memory is ample
    assert bench.devices.held(0) == 64 * MIB
    bench.memory(3 * MIB, 1024 * MIB)
    with raises("OutOfMemoryError"):  # the stand-in's device does not grow by what is given back
        in_pool(bench, 4 * MIB)
    assert bench.devices.held(0) == 0


@in_own_process
def test_torch_in_need_of_a_limit_gets_the_cores_share(bench: Bench) -> None:
    bench.set_fraction(0.125, 0)  # 128 MiB
    bench.free(bench.allocate(100 * MIB))
    in_pool(bench, 64 * MIB)
    assert bench.devices.held(0) == 0


@in_own_process
def test_nothing_is_given_back_while_a_capture_would_be_broken(bench: Bench) -> None:
    bench.free(bench.allocate(64 * MIB))
    bench.memory(0, 1024 * MIB)
    bench.capturing(True)
    with raises("OutOfMemoryError"):
        in_pool(bench, MIB)
    assert bench.devices.held(0) == 64 * MIB


@from_torch(8)
@in_own_process(capacity_bytes=64 * MIB)
def test_pools_kept_for_need_are_tried_last(bench: Bench) -> None:
    bench.use_in_need(0, POOL)
    bench.allocate(128 * MIB)
    assert bench.journal() == [f"allocate {128 * MIB}"]
