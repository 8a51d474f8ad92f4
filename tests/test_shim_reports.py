"""What torch's shim reports is true of the core and torch's allocator as one."""

from __future__ import annotations

from shim_build import (
    ALLOCATED,
    CURRENT,
    FREED,
    MIB,
    POOL,
    SIDE_STREAM,
    Bench,
    in_pool,
    raises,
    stat,
)
from shim_process import from_torch, in_own_process

# --- statistics ----------------------------------------------------------------------------------


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


# --- snapshots -----------------------------------------------------------------------------------


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
