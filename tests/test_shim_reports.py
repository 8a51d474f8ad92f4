"""What torch's shim reports is true of the core and torch's allocator as one, peaks among it."""

from __future__ import annotations

from shim_build import (
    ALLOCATED,
    CURRENT,
    FREED,
    MIB,
    PEAK,
    POOL,
    SIDE_STREAM,
    Bench,
    in_pool,
    raises,
    stat,
    try_install,
)
from shim_process import before_installing, from_torch, in_own_process


@in_own_process
def test_statistics_are_sums(bench: Bench) -> None:
    bench.allocate(1000)
    bench.free(bench.allocate(4 * MIB))
    in_pool(bench, 512)
    stats = bench.stats(0)
    core = bench.devices.stats(0)
    assert stats["allocated_bytes"][0][CURRENT] == 1024 + 512
    assert stats["active_bytes"] == stats["allocated_bytes"]
    assert stats["allocated_bytes"][0][ALLOCATED] == 1024 + 4 * MIB + 512
    assert stats["allocated_bytes"][0][FREED] == 4 * MIB
    assert stats["requested_bytes"][0][CURRENT] == 1000 + 512
    assert stats["reserved_bytes"][0][CURRENT] == bench.devices.held(0) + 512
    assert stats["allocation"][0][CURRENT] == 2
    assert stats["num_device_alloc"] == core["num_device_alloc"] + 1
    assert stats["max_split_size"] == 77  # only torch's allocator has one


@in_own_process
def test_requests_up_to_a_mebibyte_are_small(bench: Bench) -> None:
    bench.allocate(MIB)
    bench.allocate(MIB + 1)
    _, small, large = bench.stats(0)["allocated_bytes"]
    assert (small[CURRENT], large[CURRENT]) == (MIB, MIB + 512)


@in_own_process
def test_accumulated_statistics_start_again_on_both_sides(bench: Bench) -> None:
    bench.free(bench.allocate(MIB))
    bench.free(in_pool(bench, 512))
    bench.reset_accumulated(0)
    assert stat(bench, "allocated_bytes")[ALLOCATED:] == [0, 0]


@in_own_process
def test_statistics_of_no_device_are_refused(bench: Bench) -> None:
    with raises("Error: Invalid device argument 9"):
        bench.stats(9)


@in_own_process
def test_the_profiler_hears_of_every_block_with_joint_totals(bench: Bench) -> None:
    in_pool(bench, 512)
    bench.shim.vramx_torch_note_profiler()
    bench.start_profiler()
    pointer = bench.allocate(1000)
    held = bench.devices.held(0) + 512
    bench.free(pointer)
    reports = bench.stop_profiler()
    assert reports == [[pointer, 1024, 1536, held, 0], [pointer, -1024, 512, held, 0]]


@in_own_process
def test_a_profiler_that_is_announced_hears_of_frees_before_an_allocation(bench: Bench) -> None:
    pointer = bench.allocate(1000)
    bench.shim.vramx_torch_note_profiler()
    bench.start_profiler()
    bench.free(pointer)
    assert [report[:2] for report in bench.stop_profiler()] == [[pointer, -1024]]


@in_own_process
def test_a_profiler_that_nobody_announced_is_found_by_one_of_16_allocations(bench: Bench) -> None:
    early, late = bench.allocate(1000), bench.allocate(2000)
    bench.start_profiler()
    bench.free(early)
    pointers = [bench.allocate(512) for _ in range(16)]
    bench.free(late)
    changes = [report[:2] for report in bench.stop_profiler()]
    heard = changes[:-1]
    assert heard
    assert heard == [[pointer, 512] for pointer in pointers[-len(heard) :]]
    assert changes[-1] == [late, -2048]


@in_own_process(capacity_bytes=64 * MIB)
def test_the_profiler_hears_of_the_end_of_memory(bench: Bench) -> None:
    bench.start_profiler()
    with raises("OutOfMemoryError"):
        bench.allocate(128 * MIB)
    assert bench.stop_profiler() == [[0, 128 * MIB, 0, 0, 0]]


@in_own_process
def test_a_snapshot_finds_every_block_and_adds_up(bench: Bench) -> None:
    kept = bench.allocate(1000)
    bench.free(bench.allocate(8 * MIB))
    bench.device(1)
    other = bench.allocate(2 * MIB)
    bench.device(0)
    pooled = in_pool(bench, 512)
    snapshot = bench.snapshot(0)
    segments = {s["address"]: s for s in snapshot["segments"]}
    ours = [s for s in segments.values() if s["is_expandable"]]
    assert pooled in segments
    assert not segments[pooled]["is_expandable"]
    assert sum(s["total_size"] for s in ours) == bench.devices.held(-1)
    assert sum(s["allocated_size"] for s in ours) == 1024 + 2 * MIB
    assert sum(s["requested_size"] for s in ours) == 1000 + 2 * MIB
    found = {}
    for segment in ours:
        address = segment["address"]
        for block in segment["blocks"]:
            found[address] = (segment["device"], block["requested_size"], block["allocated"])
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    assert found[kept] == (0, 1000, True)
    assert found[other] == (1, 2 * MIB, True)
    assert snapshot["max_split_size"] == 77


@in_own_process
def test_a_segment_has_the_stream_of_its_blocks(bench: Bench) -> None:
    blocks = {bench.allocate(512): 0, bench.raw_alloc(512, SIDE_STREAM): SIDE_STREAM}
    found = {s["address"]: s["stream"] for s in bench.snapshot(0)["segments"]}
    assert found == blocks


@from_torch(8)
@in_own_process
def test_a_snapshot_of_a_pool_is_torchs(bench: Bench) -> None:
    bench.allocate(MIB)
    pooled = in_pool(bench, 512)
    assert [s["address"] for s in bench.snapshot(POOL)["segments"]] == [pooled]


# --- peaks ----------------------------------------------------------------------------------------


def installed_late(bench: Bench, held_before_bytes: int) -> int:
    """Install the shim over an allocator that is in use, and return the block that it has."""
    bench.init(2)
    old = int(bench.native_allocate(held_before_bytes))
    assert try_install(bench, late=True) == ""
    return old


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


@in_own_process
def test_torch_is_asked_nothing_beside_a_pool_that_is_alive(bench: Bench) -> None:
    in_pool(bench, 4 * MIB)
    before = bench.native_stats_reads()
    for block in [bench.allocate(MIB) for _ in range(20)]:  # each is a new peak
        bench.free(block)
    assert bench.native_stats_reads() == before


@before_installing
def test_torch_is_asked_nothing_after_the_last_older_tensor(bench: Bench) -> None:
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
