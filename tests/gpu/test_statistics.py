"""torch.cuda's statistics: the same numbers as torch's own allocator gives, to the byte.

Sizes are at most 1 MiB or at least 32 MiB, and whole multiples of 2 MiB then: there torch's own
allocator leaves no unsplit rest in a block, so that one expectation holds for both allocators.
"""

from __future__ import annotations

import pytest
import torch

from gpu.tools import KIB, MIB, UNIT, block, counters

pytestmark = pytest.mark.gpu

# Asked for, and what is counted: the request in whole units.
SIZES = [1, UNIT, UNIT + 1, 100 * KIB, MIB, 32 * MIB, 64 * MIB]


def in_units(size_bytes: int) -> int:
    return -(-size_bytes // UNIT) * UNIT


def growth(before: dict[str, int], key: str) -> int:
    return counters()[key] - before[key]


def beyond_what_is_held(size_bytes: int) -> int:
    """Return a size that makes reserved memory grow by at least `size_bytes`, whatever is idle.

    What earlier tests left may lie idle beside what they still hold, and serve a part of a request.
    Reserved memory is never less than allocated memory: a request of all that is idle and more has
    to bring the rest.
    """

    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return size_bytes + -(-idle // (2 * MIB)) * 2 * MIB


def test_memory_allocated_is_right_to_the_byte() -> None:
    before = torch.cuda.memory_allocated()
    tensors = [block(size) for size in SIZES]
    assert torch.cuda.memory_allocated() - before == sum(map(in_units, SIZES))
    del tensors[2:5]
    kept = SIZES[:2] + SIZES[5:]
    assert torch.cuda.memory_allocated() - before == sum(map(in_units, kept))
    tensors.clear()
    assert torch.cuda.memory_allocated() == before


def test_requested_bytes_are_what_was_asked_for() -> None:
    before = counters()
    tensors = [block(size) for size in SIZES]
    assert growth(before, "requested_bytes.all.current") == sum(SIZES)
    tensors.clear()
    assert growth(before, "requested_bytes.all.current") == 0


def test_blocks_are_counted_by_pool() -> None:
    before = counters()
    tensors = [block(size) for size in SIZES]
    small = sum(size <= MIB for size in SIZES)
    assert growth(before, "allocation.all.current") == len(SIZES)
    assert growth(before, "allocation.small_pool.current") == small
    assert growth(before, "allocation.large_pool.current") == len(SIZES) - small
    assert growth(before, "active.all.current") == len(SIZES)
    assert growth(before, "active_bytes.all.current") == sum(map(in_units, SIZES))
    del tensors


def test_the_peak_stays_until_it_is_reset() -> None:
    before = torch.cuda.memory_allocated()
    kept, dropped = block(32 * MIB), block(64 * MIB)
    del dropped
    assert torch.cuda.max_memory_allocated() - before == 96 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before + 32 * MIB
    del kept


def test_the_peak_of_reserved_memory_is_reset_to_what_is_held() -> None:
    held = torch.cuda.memory_reserved()
    block(beyond_what_is_held(64 * MIB))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held
    assert torch.cuda.max_memory_reserved() >= held + 64 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()


def test_reserved_covers_allocated_and_falls_when_the_cache_is_emptied() -> None:
    held = torch.cuda.memory_reserved()
    tensor = block(beyond_what_is_held(64 * MIB))
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert torch.cuda.memory_reserved() >= held + 64 * MIB
    del tensor
    assert torch.cuda.memory_reserved() >= held + 64 * MIB, "a free alone gives nothing back"
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held


@pytest.mark.alone
def test_empty_cache_gives_memory_back_to_the_device() -> None:
    size = beyond_what_is_held(512 * MIB)
    tensor = block(size)
    torch.cuda.synchronize()
    held, free_before = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    del tensor
    torch.cuda.empty_cache()
    given_back = held - torch.cuda.memory_reserved()
    assert given_back >= 512 * MIB
    assert torch.cuda.mem_get_info()[0] - free_before >= given_back


@pytest.mark.alone
def test_what_is_reserved_is_what_the_device_lacks() -> None:
    free_before, held_before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    tensor = block(532 * MIB)
    taken = free_before - torch.cuda.mem_get_info()[0]
    counted = torch.cuda.memory_reserved() - held_before
    # The driver's page tables come on top: 8 bytes for 4 KiB at most, in pages of 2 MiB.
    assert 0 <= taken - counted <= counted // 512 + 2 * MIB
    del tensor


def test_torch_accelerator_has_the_same_statistics() -> None:
    if not hasattr(torch.accelerator, "memory_stats"):
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.memory_stats")
    kept, dropped = block(32 * MIB), block(64 * MIB)
    del dropped
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() > 0
    assert torch.accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved() > 0
    general, specific = torch.accelerator.memory_stats(), counters()
    assert {"allocated_bytes.all.current", "reserved_bytes.all.peak", "num_ooms"} <= set(general)
    shared = set(general) & set(specific)
    assert {key: general[key] for key in shared} == {key: specific[key] for key in shared}
    del kept


def test_torch_accelerator_empties_the_cache_and_resets_peaks() -> None:
    if not hasattr(torch.accelerator, "empty_cache"):
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.empty_cache")
    held = torch.cuda.memory_reserved()
    block(64 * MIB)
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_reserved() <= held
    torch.accelerator.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


@pytest.mark.alone
def test_torch_accelerator_tells_free_and_total_memory() -> None:
    if not hasattr(torch.accelerator, "get_memory_info"):
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.get_memory_info")
    assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()


def test_memory_summary_is_a_table_of_these_numbers() -> None:
    kept = block(64 * MIB)
    for abbreviated in (False, True):
        text = torch.cuda.memory_summary(abbreviated=abbreviated)
        assert "PyTorch CUDA memory summary, device ID 0" in text
        assert "Allocated memory" in text
    rows = [line for line in text.splitlines() if "Allocated memory" in line]
    current = rows[0].split("|")[2].split()
    unit = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": KIB * MIB}[current[1]]
    assert int(current[0]) == torch.cuda.memory_allocated() // unit
    del kept


def test_the_backend_has_the_allocators_name(allocator: str) -> None:
    assert torch.cuda.get_allocator_backend() == allocator
