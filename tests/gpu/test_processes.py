"""What a process does as a whole: forks, exits, sharing, a broken context, all given back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from gpu import runner
from gpu.runner import Outcome, script

pytestmark = pytest.mark.gpu

# Those that say something alone, and those that are compared with torch's own allocator.
ALONE = ["device_assert", "live_at_exit", "gpu_trace", "one_rank_nccl"]
COMPARED = ["everything_back", "share_tensor"]
COUNT = 1 << 22  # elements that share_tensor shares

# By program and allocator.
Outcomes = dict[tuple[str, str], Future[Outcome]]


@pytest.fixture(scope="module")
def outcomes(allocator: str) -> Iterator[Outcomes]:
    """Run every program under the chosen allocator, and under torch's own where it is compared."""
    runs = {(name, allocator) for name in ALONE} | {
        (name, each) for name in COMPARED for each in (allocator, "native")
    }
    # Only one of the programs uses NCCL, and it is there for this.
    variables = runner.environment({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"})
    with runner.started({each: (script(*each), variables) for each in runs}) as running:
        yield running


@pytest.fixture
def live_at_exit(outcomes: Outcomes, allocator: str) -> Outcome:
    return outcomes["live_at_exit", allocator].result()


@pytest.fixture
def everything_back(outcomes: Outcomes, allocator: str) -> list[dict[str, Any]]:
    """What is left under the chosen allocator, and under torch's own."""
    return [outcomes["everything_back", each].result().facts() for each in (allocator, "native")]


# --- forks and exits ------------------------------------------------------------------------------


def test_a_process_ends_well_with_tensors_alive(live_at_exit: Outcome) -> None:
    assert live_at_exit.code == 0, str(live_at_exit)
    assert "terminate called" not in live_at_exit.stderr


def test_forked_workers_of_a_data_loader_feed_the_gpu(live_at_exit: Outcome) -> None:
    facts = live_at_exit.facts()
    assert facts["loaded"] == facts["loaded_again"] == sum(range(64)) * 1000


def test_a_forked_child_frees_what_it_inherited_without_effect(live_at_exit: Outcome) -> None:
    assert live_at_exit.facts()["childs_exit_code"] == 0


@pytest.mark.vramx_only
def test_a_broken_context_raises_and_does_not_abort(outcomes: Outcomes) -> None:
    """Torch's own allocator ends such a program with SIGABRT: it throws in the free of a tensor
    that another stream used (2.11)."""
    ours = outcomes["device_assert", "vramx"].result()
    assert ours.facts() == {"first": True, "second": True}


# --- who else wants to know -----------------------------------------------------------------------


def test_torchs_gpu_trace_sees_allocations_and_frees(outcomes: Outcomes, allocator: str) -> None:
    assert outcomes["gpu_trace", allocator].result().facts() == {"allocated": 1, "freed": 1}


def test_nccl_may_ask_to_be_told_of_new_memory(outcomes: Outcomes, allocator: str) -> None:
    assert outcomes["one_rank_nccl", allocator].result().facts()["totals"] == [0, 1, 2, 3, 4]


# --- sharing between processes --------------------------------------------------------------------


@pytest.fixture
def shared(outcomes: Outcomes, allocator: str) -> dict[str, Any]:
    native = outcomes["share_tensor", "native"].result().facts()
    if "error" in native["ordinary"]:
        pytest.skip(f"no CUDA IPC on this machine: {native['ordinary']['error'].splitlines()[0]}")
    return outcomes["share_tensor", allocator].result().facts()


def test_a_tensor_of_a_pool_is_shared_with_another_process(shared: dict[str, Any]) -> None:
    assert shared["pooled"] == {"total": COUNT, "doubled": 2 * COUNT}
    assert shared["childs_exit_code"] == 0


def test_an_ordinary_tensor_is_shared_or_the_error_names_the_way(
    shared: dict[str, Any], allocator: str
) -> None:
    if allocator == "native":
        assert shared["ordinary"] == {"total": COUNT, "doubled": 2 * COUNT}
    else:
        assert "torch.cuda.MemPool()" in shared["ordinary"]["error"]
        assert "use_mem_pool" in shared["ordinary"]["error"]


# --- everything -----------------------------------------------------------------------------------


def test_nothing_is_left_when_everything_is_freed(everything_back: list[dict[str, Any]]) -> None:
    ours, native = everything_back
    assert ours["allocated"] == native["allocated"] == 0
    assert ours["reserved"] <= native["reserved"]
    assert ours["segments"] <= native["segments"]
    assert ours["violation"] == ""


def test_the_statistics_have_the_keys_of_torchs_own(everything_back: list[dict[str, Any]]) -> None:
    ours, native = everything_back
    assert ours["keys"] == native["keys"]
    assert len(native["keys"]) > 50
