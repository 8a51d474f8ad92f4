"""What vramx.record writes: read by torch's viewer, by replays and by the command line."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from record_tools import features, path, recorder, residuals, train
from samples import assert_one_line_refusal
from snapshot_writer import Recording

from vramx.memory import categories as names
from vramx.memory.holders import category_tree
from vramx.memory.snapshot import Snapshot

__all__ = ["path"]


@pytest.fixture
def recorded(path: Path) -> dict[str, Any]:
    model, source = residuals(), CpuHistory()
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, source, model, optimizer):
        train(model, optimizer, features)
    data: dict[str, Any] = pickle.loads(path.read_bytes())
    return data


def test_the_file_is_one_for_torchs_viewer_with_categories_and_what_is_outside_of_torch(
    recorded: dict[str, Any], path: Path
) -> None:
    from torch.cuda import _memory_viz as viz

    assert "<script" in viz.trace_plot(recorded)
    assert "<script" in viz.segment_plot(recorded)
    (trace,) = recorded["device_traces"]
    assert "unknown" in {entry.get("category") for entry in trace}  # which the viewer needs
    blocks = [block for segment in recorded["segments"] for block in segment["blocks"]]
    assert {block["category"] for block in blocks} >= {names.PARAMETERS, names.OPTIMIZER}
    assert Snapshot.load(path).outside_bytes == 12345


def test_the_file_is_whole_or_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    path.write_bytes(b"before")
    recording = recorder(path, CpuHistory())
    recording.start()
    torch.zeros(4)
    monkeypatch.setattr(pickle, "dump", fail)
    with pytest.raises(KeyboardInterrupt):
        recording.stop()
    assert [(file.name, file.read_bytes()) for file in path.parent.iterdir()] == [
        ("run.pickle", b"before")
    ]


def test_each_rank_writes_its_own_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with recorder(path, CpuHistory()):
        torch.zeros(4)
    assert [file.name for file in path.parent.iterdir()] == ["run.rank3.pickle"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stats", "--by", "category"), ("optimizer", "Outside of torch")),
        (("stats", "--by", "module", "--at", "end"), ("parameters",)),
        (("explain",), ("is for", "optimizer")),
    ],
)
def test_the_command_line_says_what_memory_is_for(
    recorded: dict[str, Any], path: Path, run: Any, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    code, out, _ = run(words[0], path, *words[1:])
    assert code == 0
    assert all(text in out for text in said)


def test_the_command_line_refuses_categories_that_are_not_there(path: Path, run: Any) -> None:
    recording = Recording()
    recording.alloc(512)
    assert_one_line_refusal(*run("stats", recording.save(path), "--by", "category"), "vramx.record")


# --- files that others wrote ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "own",
    [
        7,
        {},
        {"schema": 2, "labels": ["", "a"]},
        {"schema": 1},
        {"schema": 1, "labels": []},
        {"schema": 1, "labels": [7, None], "devices": 7, "outside_bytes": {}},
        {"schema": 1, "labels": ["", "a"], "devices": [7], "outside_bytes": ["x"]},
        {"schema": 1, "labels": ["", "a"], "devices": [{"events": {}, "blocks": 9}]},
        {"schema": 1, "labels": ["", "a"], "devices": [{"events": [9, -1, "x"], "blocks": [[1]]}]},
        {"schema": 1, "labels": ["", "a"], "devices": [{"events": [], "blocks": [[{}, 1]]}]},
    ],
)
def test_what_is_odd_in_a_file_is_passed_over(
    own: Any, recorded: dict[str, Any], path: Path
) -> None:
    path.write_bytes(pickle.dumps({**recorded, "vramx": own}, protocol=4))
    snapshot = Snapshot.load(path)
    assert snapshot.outside_bytes is None
    assert names.OPTIMIZER in snapshot.categories  # which stand on the events themselves
    tree = category_tree(snapshot, snapshot.peak_event)
    assert tree.bytes == snapshot.live_bytes_at(snapshot.peak_event)


def test_categories_that_are_no_text_are_none(recorded: dict[str, Any], path: Path) -> None:
    for entry in recorded["device_traces"][0]:
        entry["category"] = 7
    for segment in recorded["segments"]:
        for block in segment["blocks"]:
            block["category"] = [1]
    path.write_bytes(pickle.dumps(recorded, protocol=4))
    assert not Snapshot.load(path).has_categories


def test_text_that_moves_the_cursor_is_made_harmless(recorded: dict[str, Any], path: Path) -> None:
    recorded["device_traces"][0][0]["category"] = "\x1b[2J"
    recorded["vramx"]["labels"][1] = "\x1b[2J"
    path.write_bytes(pickle.dumps(recorded, protocol=4))
    snapshot = Snapshot.load(path)
    assert all(text.isprintable() for text in (*snapshot.categories, *snapshot.labels))
