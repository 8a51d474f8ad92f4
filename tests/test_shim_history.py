"""torch's shim keeps the history that torch asks for, one with that of torch's own allocator."""

from __future__ import annotations

from typing import Any

import pytest
from shim_build import MIB, SIDE_STREAM, Bench, in_pool, raises, try_install
from shim_process import before_installing, from_torch, in_own_process

STATE, ALLOC, ALL = 1, 2, 3  # torch's levels of stack traces


def trace(bench: Bench) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = bench.snapshot(0)["device_traces"][0]
    return entries


def actions(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["action"] for entry in entries]


@in_own_process
def test_without_a_history_nothing_is_recorded(bench: Bench) -> None:
    assert not bench.is_history_enabled()
    bench.free(bench.allocate(512))
    assert trace(bench) == []


@in_own_process
def test_the_history_tells_what_happened_in_order(bench: Bench) -> None:
    bench.record_history(True, 100, ALL, "")
    assert bench.is_history_enabled()
    bench.stream(SIDE_STREAM)
    pointer = bench.allocate(1000)
    bench.free(pointer)
    entries = trace(bench)
    assert actions(entries) == ["segment_map", "alloc", "free_requested", "free_completed"]
    mapped, *block = entries
    assert {(e["addr"], e["size"], e["stream"]) for e in block} == {(pointer, 1000, SIDE_STREAM)}
    assert mapped["addr"] <= pointer < mapped["addr"] + mapped["size"]
    assert [e["time_us"] for e in entries] == sorted(e["time_us"] for e in entries)
    assert actions(trace(bench))[-1] == "snapshot"


@in_own_process
def test_the_history_is_one_with_torchs(bench: Bench) -> None:
    bench.record_history(True, 100, STATE, "")
    bench.allocate(1024)
    in_pool(bench, 2048)
    bench.allocate(4096)
    sizes = [e["size"] for e in trace(bench) if e["action"] == "alloc"]
    assert sizes == [1024, 2048, 4096]
    assert actions(trace(bench)).count("snapshot") == 1  # of both, not of each


@in_own_process
def test_a_history_keeps_the_last_entries(bench: Bench) -> None:
    bench.record_history(True, 3, STATE, "")
    for size in (512, 1024, 1536, 2048):
        bench.allocate(size)
    assert [e["size"] for e in trace(bench)] == [1024, 1536, 2048]


@pytest.mark.parametrize("level", [STATE, ALLOC, ALL], ids=["blocks", "allocations", "frees too"])
@in_own_process
def test_stack_traces_are_of_what_the_level_says(bench: Bench, level: int) -> None:
    bench.record_history(True, 100, level, "")
    pointer = bench.allocate(512)
    block = bench.snapshot(0)["segments"][0]["blocks"][0]
    assert block["context"] == 1
    bench.free(pointer)
    contexts = [e["context"] for e in trace(bench) if "seg" not in e["action"]]
    allocated = 1 if level >= ALLOC else 0
    freed = 2 if level == ALL else allocated
    assert contexts[0] == allocated
    assert contexts[-2:] == [freed, freed]


@in_own_process
def test_a_block_has_its_stack_trace_and_no_others(bench: Bench) -> None:
    bench.record_history(True, 100, ALL, "")
    first = bench.allocate(512)
    assert bench.context_of(first) in (1, -1)  # -1: this torch does not ask
    bench.record_history(False, 1, 0, "")
    bench.free(first)
    bench.record_history(True, 100, ALL, "")
    contexts = [b["context"] for s in bench.snapshot(0)["segments"] for b in s["blocks"]]
    assert set(contexts) == {0}


@from_torch(10)
@before_installing
def test_a_label_may_be_set_before_cuda_starts(bench: Bench) -> None:
    assert try_install(bench) == ""
    bench.labels("graph 7", "epoch 1")
    assert bench.user_metadata() == "epoch 1"
    bench.init(2)
    bench.record_history(True, 100, STATE, "")
    bench.allocate(512)
    assert [e["user_metadata"] for e in trace(bench) if e["action"] == "alloc"] == ["epoch 1"]


@in_own_process
def test_entries_carry_the_labels_of_their_thread(bench: Bench) -> None:
    bench.record_history(True, 100, STATE, "")
    bench.labels("graph 7", "epoch 1")
    bench.allocate(512)
    (entry,) = [e for e in trace(bench) if e["action"] == "alloc"]
    assert entry.get("compile_context", "graph 7") == "graph 7"
    assert entry.get("user_metadata", "epoch 1") == "epoch 1"


@from_torch(11)
@in_own_process
def test_skipped_actions_are_not_kept(bench: Bench) -> None:
    bench.record_history(True, 100, STATE, "free_completed")
    bench.free(bench.allocate(512))
    assert actions(trace(bench)) == ["segment_map", "alloc", "free_requested"]


@in_own_process(capacity_bytes=64 * MIB)
def test_out_of_memory_is_in_the_history(bench: Bench) -> None:
    bench.record_history(True, 100, ALLOC, "")
    bench.memory(5 * MIB, 64 * MIB)
    with raises("OutOfMemoryError"):
        bench.allocate(128 * MIB)
    (entry,) = [e for e in trace(bench) if e["action"] == "oom"]
    assert (entry["addr"], entry["size"]) == (5 * MIB, 128 * MIB)
    assert entry["context"] > 0


@in_own_process
def test_trackers_hear_of_both_sides_without_a_history(bench: Bench) -> None:
    bench.attach_tracker()
    bench.free(bench.allocate(512))
    assert actions(bench.tracked()) == ["segment_map", "alloc", "free_requested", "free_completed"]
    in_pool(bench, 512)
    assert actions(bench.tracked()) == ["alloc"]
    assert trace(bench) == []
