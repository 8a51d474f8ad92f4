"""MemPool: torch's private pools of memory, with torch's and with a user's allocator in them."""

from __future__ import annotations

import ctypes
import gc
import inspect
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.tools import MIB, block, failure_of, holds, room, settle

pytestmark = pytest.mark.gpu

SIZE = 64 * MIB

# A user's allocator: libcuda's plain memory, and a count of the calls.
USER_ALLOCATOR = r"""
#include <cstddef>
#include <dlfcn.h>
namespace {
void* driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return library ? dlsym(library, name) : nullptr;
}
}
extern "C" {
int allocations = 0;
int frees = 0;
void* user_alloc(size_t size, int, void*) {
  auto allocate = reinterpret_cast<int (*)(unsigned long long*, size_t)>(driver("cuMemAlloc_v2"));
  unsigned long long address = 0;
  if (allocate == nullptr || allocate(&address, size) != 0) return nullptr;
  ++allocations;
  return reinterpret_cast<void*>(address);
}
void user_free(void* address, size_t, int, void*) {
  auto release = reinterpret_cast<int (*)(unsigned long long)>(driver("cuMemFree_v2"));
  if (release) release(reinterpret_cast<unsigned long long>(address));
  ++frees;
}
}
"""


def new_pool(**options: bool) -> Any:
    """Make a pool, or skip where this torch does not know an option."""
    unknown = set(options) - set(inspect.signature(torch.cuda.MemPool.__init__).parameters)
    if unknown:
        pytest.skip(f"torch {torch.__version__} has no MemPool({', '.join(sorted(unknown))}=...)")
    return torch.cuda.MemPool(**options)


def pool_with_a_block() -> tuple[Any, torch.Tensor]:
    """Make a pool and a block of threes in it."""
    pool = new_pool()
    with torch.cuda.use_mem_pool(pool):
        return pool, block(SIZE, 3)


def holds_address(segments: list[dict[str, Any]], address: int) -> bool:
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in segments
    )


def test_what_is_allocated_inside_is_in_the_pool_and_the_rest_is_not() -> None:
    pool, inside = pool_with_a_block()
    outside = block(SIZE, 5)
    segments = pool.snapshot()
    assert holds_address(segments, inside.data_ptr())
    assert not holds_address(segments, outside.data_ptr())
    assert {tuple(segment["segment_pool_id"]) for segment in segments} == {tuple(pool.id)}
    assert holds(inside, 3)
    assert holds(outside, 5)


def test_pools_count_in_the_statistics() -> None:
    allocated = torch.cuda.memory_allocated()
    _pool, inside = pool_with_a_block()
    assert torch.cuda.memory_allocated() - allocated == SIZE
    assert torch.cuda.max_memory_allocated() - allocated == SIZE
    segments = torch.cuda.memory_snapshot()
    assert holds_address(segments, inside.data_ptr())
    assert sum(each["total_size"] for each in segments) == torch.cuda.memory_reserved()


def test_a_pool_gives_its_memory_back() -> None:
    held = torch.cuda.memory_reserved()
    pool, inside = pool_with_a_block()
    assert torch.cuda.memory_reserved() >= held + SIZE
    del inside, pool
    settle()
    assert torch.cuda.memory_reserved() <= held


def test_memory_freed_inside_a_pool_serves_the_pool_again() -> None:
    pool = new_pool()
    with torch.cuda.use_mem_pool(pool):
        address = block(SIZE).data_ptr()
    outside = block(SIZE)
    assert outside.data_ptr() != address
    with torch.cuda.use_mem_pool(pool):
        assert block(SIZE).data_ptr() == address


def test_a_pool_that_is_being_filled_takes_no_requests_of_other_threads() -> None:
    cached = block(SIZE)
    held = torch.cuda.memory_reserved()
    taken = []
    with torch.cuda.use_mem_pool(new_pool()):
        del cached
        thread = threading.Thread(target=lambda: taken.append(block(SIZE)))
        thread.start()
        thread.join()
    assert len(taken) == 1
    assert torch.cuda.memory_reserved() == held


def test_a_tensor_may_outlive_its_pool() -> None:
    pool, inside = pool_with_a_block()
    del pool
    gc.collect()
    assert holds(inside, 3)
    allocated = torch.cuda.memory_allocated()
    del inside
    assert torch.cuda.memory_allocated() == allocated - SIZE


def test_record_stream_works_on_memory_of_a_pool() -> None:
    _pool, inside = pool_with_a_block()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = inside.sum(dtype=torch.int64)
    inside.record_stream(side)
    del inside
    torch.cuda.current_stream().wait_stream(side)
    assert total.item() == 3 * SIZE


def test_a_pool_that_may_be_used_on_oom_is() -> None:
    pool = new_pool(use_on_oom=True)
    with room(300 * MIB):
        with torch.cuda.use_mem_pool(pool):
            address = block(256 * MIB).data_ptr()
        outside = block(256 * MIB)
        assert outside.data_ptr() == address
        failure_of(lambda: block(256 * MIB))
    del outside


def test_a_pool_that_may_not_be_used_on_oom_is_not() -> None:
    pool = new_pool()
    with room(300 * MIB):
        with torch.cuda.use_mem_pool(pool):
            block(256 * MIB)
        failure_of(lambda: block(256 * MIB))
    del pool


def test_a_pool_that_may_not_split_has_one_block_a_segment() -> None:
    pool = new_pool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        tensors = [block(5 * MIB) for _ in range(3)]
    assert [len(segment["blocks"]) for segment in pool.snapshot()] == [1] * len(tensors)


@pytest.fixture(scope="module")
def user_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("user_allocator")
    source, library = folder / "user.cpp", folder / "user.so"
    source.write_text(USER_ALLOCATOR)
    command = [compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return library


def test_a_pool_takes_its_memory_from_a_users_allocator(user_library: Path) -> None:
    calls = ctypes.CDLL(str(user_library))
    allocations = ctypes.c_int.in_dll(calls, "allocations")
    frees = ctypes.c_int.in_dll(calls, "frees")
    users = torch.cuda.memory.CUDAPluggableAllocator(str(user_library), "user_alloc", "user_free")
    pool = torch.cuda.MemPool(users.allocator())
    with torch.cuda.use_mem_pool(pool):
        inside = block(SIZE, 3)
    assert allocations.value == 1
    outside = block(SIZE, 5)
    assert allocations.value == 1
    assert holds(inside, 3)
    assert holds(outside, 5)
    del inside, pool
    settle()
    assert frees.value == 1
