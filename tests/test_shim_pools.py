"""torch's shim leaves CUDA graphs and memory pools to torch's allocator, and shares memory."""

from __future__ import annotations

from shim_build import MIB, POOL, SIDE_STREAM, STREAM, Bench, in_pool, raises, stat
from shim_process import from_torch, in_own_process

# --- pools ---------------------------------------------------------------------------------------


@in_own_process
def test_requests_of_a_pool_go_to_torch_while_it_is_filled(bench: Bench) -> None:
    bench.begin_pool(0, POOL, SIDE_STREAM)
    bench.stream(SIDE_STREAM)
    pooled = bench.allocate(512)
    bench.stream(STREAM)
    bench.allocate(1024)
    bench.stream(SIDE_STREAM)
    bench.end_pool(0, POOL)
    bench.allocate(1024)
    assert bench.devices.allocated(0) == 2048
    bench.free(pooled)
    assert bench.journal() == [f"begin {POOL}", "allocate 512", f"end {POOL}", "delete"]


@in_own_process
def test_a_pool_of_one_device_leaves_the_others_alone(bench: Bench) -> None:
    bench.begin_pool(0, POOL, STREAM)
    bench.device(1)
    bench.allocate(512)
    assert bench.devices.allocated(1) == 512


@in_own_process
def test_a_restored_checkpoint_carries_our_deleter(bench: Bench) -> None:
    assert bench.checkpoint(0) == 2
    assert bench.journal() == ["allocate 512"] * 2 + ["delete"] * 2


@in_own_process
def test_a_pool_may_have_us_as_its_allocator(bench: Bench) -> None:
    bench.record_history(True, 100, 3, "")
    bench.segment_source()
    bench.begin_pool(0, POOL, STREAM)
    pointer = bench.allocate(2 * MIB)
    assert bench.devices.allocated(0) == 2 * MIB
    bench.end_pool(0, POOL)
    bench.free(pointer)
    bench.empty_cache(0)
    assert bench.devices.allocated(0) == 0


@from_torch(8)
@in_own_process
def test_what_a_pool_with_us_as_its_allocator_holds_counts_once(bench: Bench) -> None:
    bench.set_limit(0, 5 * MIB)
    bench.make_pool(0, POOL)
    in_pool(bench, 2 * MIB)
    for name in ("allocated_bytes", "reserved_bytes", "requested_bytes"):
        assert stat(bench, name)[:2] == [2 * MIB, 2 * MIB]
    bench.allocate(2 * MIB)  # the limit has room for both


@in_own_process(capacity_bytes=64 * MIB)
def test_a_pool_whose_allocator_has_no_memory_says_so_itself(bench: Bench) -> None:
    bench.segment_source()
    bench.begin_pool(0, POOL, STREAM)
    with raises("OutOfMemoryError: CUDA out of memory. (native)"):
        bench.allocate(128 * MIB)


@in_own_process(count=1)
def test_a_pool_whose_allocator_cannot_serve_the_device_says_so_itself(bench: Bench) -> None:
    bench.segment_source()
    bench.device(1)
    bench.begin_pool(1, POOL, STREAM)
    with raises("OutOfMemoryError: CUDA out of memory. (native)"):
        bench.allocate(512)


# --- other devices and processes -----------------------------------------------------------------


@in_own_process
def test_base_allocation_is_the_block(bench: Bench) -> None:
    assert bench.base_allocation(bench.allocate(1000)) == 1024
    bench.begin_pool(0, POOL, STREAM)
    assert bench.base_allocation(bench.allocate(512)) == 512


@in_own_process
def test_sharing_with_a_process_names_the_way(bench: Bench) -> None:
    with raises("Error: vramx: this tensor's memory cannot be shared") as texts:
        bench.share(bench.allocate(512))
    assert "with torch.cuda.use_mem_pool(torch.cuda.MemPool()):" in texts[0]
    bench.begin_pool(0, POOL, STREAM)
    assert bench.share(bench.allocate(512)) == "shared"


@in_own_process
def test_peer_access_is_given_on_both_sides(bench: Bench) -> None:
    bench.allocate(MIB)
    before = bench.devices.driver_calls(0)["set_access"]
    bench.peer(1, 0)
    assert bench.journal() == ["peer 1 to 0"]
    assert bench.devices.driver_calls(0)["set_access"] > before


@in_own_process
def test_copies_without_peer_access_name_both_devices(bench: Bench) -> None:
    bench.copy(1, 0, False)
    assert bench.peer_copies() == 0  # nothing mapped anywhere
    bench.allocate(MIB)
    bench.copy(1, 0, True)
    bench.copy(0, 0, False)
    assert bench.peer_copies() == 0
    assert bench.journal() == ["copy"] * 3
    bench.copy(1, 0, False)
    assert bench.peer_copies() == 1
