"""Snapshots and histories of memory: complete, and readable by torch's own tools."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz
from torch.cuda._memory_viz import Bytes, segsum

from gpu.tools import MIB, block, failure_of, room
from vramx.memory.trace import load_trace

pytestmark = pytest.mark.gpu

SIZES = [512, 3 * 512, MIB, 32 * MIB, 64 * MIB]


def blocks_of(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [piece for segment in segments for piece in segment["blocks"]]


def all_active_at(segments: list[dict[str, Any]], address: int) -> list[dict[str, Any]]:
    return [
        piece
        for piece in blocks_of(segments)
        if piece["state"] == "active_allocated"
        and piece["address"] <= address < piece["address"] + piece["size"]
    ]


def active_at(segments: list[dict[str, Any]], address: int) -> dict[str, Any]:
    """Return the one active block that holds an address."""
    (found,) = all_active_at(segments, address)
    return found


def events(action: str) -> list[dict[str, Any]]:
    """Return the recorded events of one kind on the first device."""
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event for event in trace if event["action"] == action]


def allocate_here() -> Any:
    """The frame that a history must name."""
    return block(32 * MIB)


@pytest.fixture
def history() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(
        stacks="python", max_entries=10_000, clear_history=True
    )
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


# --- snapshots ------------------------------------------------------------------------------------


def test_segments_add_up_to_what_is_reserved() -> None:
    tensors = [block(size) for size in SIZES]
    del tensors[3]
    segments = torch.cuda.memory_snapshot()
    assert sum(each["total_size"] for each in segments) == torch.cuda.memory_reserved()
    assert sum(each["allocated_size"] for each in segments) == torch.cuda.memory_allocated()
    del tensors


def test_every_live_tensor_is_in_an_active_block() -> None:
    tensors = [block(size) for size in SIZES]
    segments = torch.cuda.memory_snapshot()
    for tensor, size in zip(tensors, SIZES, strict=True):
        piece = active_at(segments, tensor.data_ptr())
        assert piece["address"] == tensor.data_ptr()
        assert piece["requested_size"] == size


def test_a_freed_tensor_is_in_no_active_block() -> None:
    tensor = block(32 * MIB)
    address = tensor.data_ptr()
    del tensor
    assert not all_active_at(torch.cuda.memory_snapshot(), address)


def test_a_dumped_snapshot_is_a_pickle_of_plain_data(tmp_path: Path) -> None:
    tensor = block(32 * MIB)
    path = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)
    assert active_at(snapshot["segments"], tensor.data_ptr())["size"] == 32 * MIB


def test_a_snapshot_has_a_trace_for_each_device() -> None:
    assert len(torch.cuda.memory._snapshot()["device_traces"]) == torch.cuda.device_count()


# --- histories ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("history")
def test_an_allocation_is_recorded_with_the_python_stack() -> None:
    tensor = allocate_here()
    (event,) = [each for each in events("alloc") if each["addr"] == tensor.data_ptr()]
    assert event["size"] == 32 * MIB
    frames = {(Path(frame["filename"]).name, frame["name"]) for frame in event["frames"]}
    assert (Path(__file__).name, allocate_here.__name__) in frames


@pytest.mark.usefixtures("history")
def test_a_live_block_knows_where_it_was_allocated() -> None:
    tensor = allocate_here()
    piece = active_at(torch.cuda.memory_snapshot(), tensor.data_ptr())
    assert allocate_here.__name__ in {frame["name"] for frame in piece["frames"]}


@pytest.mark.usefixtures("history")
def test_a_free_is_recorded_as_requested_and_completed() -> None:
    tensor = allocate_here()
    address = tensor.data_ptr()
    del tensor
    for action in ("free_requested", "free_completed"):
        assert [each["size"] for each in events(action) if each["addr"] == address] == [32 * MIB]


@pytest.mark.usefixtures("history")
def test_growth_and_its_end_are_recorded() -> None:
    before = torch.cuda.memory_reserved()
    tensor = block(512 * MIB)
    grown = events("segment_alloc") + events("segment_map")
    held = torch.cuda.memory_reserved()
    assert sum(each["size"] for each in grown) == held - before > 256 * MIB
    del tensor
    torch.cuda.empty_cache()
    shrunk = events("segment_free") + events("segment_unmap")
    assert sum(each["size"] for each in shrunk) == held - torch.cuda.memory_reserved() > 256 * MIB


@pytest.mark.usefixtures("history")
def test_a_failure_is_recorded() -> None:
    with room(256 * MIB):
        failure_of(lambda: block(1024 * MIB))
    assert [each["size"] for each in events("oom")] == [1024 * MIB]


def test_nothing_is_recorded_once_it_is_switched_off() -> None:
    record = torch.cuda.memory._record_memory_history
    record(stacks="python", max_entries=10_000, clear_history=True)
    record(enabled=None)
    before = len(events("alloc"))
    tensor = allocate_here()
    assert len(events("alloc")) == before
    assert not active_at(torch.cuda.memory_snapshot(), tensor.data_ptr())["frames"]


# --- torch's own readers --------------------------------------------------------------------------


@pytest.fixture
def recorded(history: None) -> dict[str, Any]:
    """A snapshot with live and freed blocks, growth and a failure in it."""
    kept = [allocate_here() for _ in range(4)]
    del kept[1::2]
    with room(256 * MIB):
        failure_of(lambda: block(1024 * MIB))
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


@pytest.mark.parametrize("name", ["segsum", "trace", "trace_plot", "segment_plot"])
def test_torchs_memory_viz_reads_it(recorded: dict[str, Any], name: str) -> None:
    text = getattr(_memory_viz, name)(recorded)
    expected = {"segsum": "total_allocated", "trace": "raise OutOfMemoryError"}
    assert expected.get(name, '"base64"') in text


@pytest.mark.parametrize("name", ["segments", "memory"])
def test_torchs_flame_graphs_read_it(recorded: dict[str, Any], name: str) -> None:
    # The lines themselves: drawing them needs a script from the network.
    lines = getattr(_memory_viz, name)(recorded, format_flamegraph=lambda text: text)
    frame = rf"{re.escape(Path(__file__).name)}:\d+:{allocate_here.__name__}"
    assert re.search(rf";active_allocated;.*{frame};.* {32 * MIB}$", lines, re.MULTILINE)


def test_segsum_accounts_for_every_byte(recorded: dict[str, Any]) -> None:
    total = sum(segment["total_size"] for segment in recorded["segments"])
    assert f"total_reserved: {Bytes(total)}" in segsum(recorded)


def test_vramx_reads_it(recorded: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorded))
    # Four allocations and two frees, beside what was live before.
    assert load_trace(path, device=0).size.tolist().count(32 * MIB) >= 4
