"""What vramx writes is read by the tools that people have for torch's snapshots.

torch's own viewer is run (test_record_file.py, too), and pt-snap where it is installed. Mosaic is
on no package index: what it reads of a file is stated here, and was compared with the tool itself
at 67b27bb of github.com/facebookresearch/mosaic.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from child_processes import python
from samples import recorded_snapshot

from vramx.allocator.oom_document import Failure, pickled
from vramx.memory.attribution import add_categories
from vramx.memory.categories import Log

pytest.importorskip("torch")

PT_SNAP = (
    "import importlib.metadata as m; "
    "(found,) = m.entry_points(group='console_scripts', name='pt-snap'); found.load()()"
)
STACK = [{"name": "train", "filename": "train.py", "line": 12}]


def with_categories(name: str) -> dict[str, Any]:
    data: dict[str, Any] = pickle.loads(recorded_snapshot(name))
    add_categories(data, Log(), workspace_sizes=(32 << 20,), outside_bytes=[1 << 20])
    return data


def failure(name: str, *, has_history: bool = True) -> dict[str, Any]:
    data: dict[str, Any] = pickle.loads(recorded_snapshot(name))
    if not has_history:
        data["device_traces"] = [[]]
    written: dict[str, Any] = pickle.loads(pickled(data, Failure(0, 1 << 30, 1 << 20, STACK)))
    return written


OURS = {
    "a recording": lambda: with_categories("train"),
    "a recording that ran out of memory": lambda: with_categories("oom"),
    "a failure": lambda: failure("train"),
    "a failure without history": lambda: failure("train", has_history=False),
}


@pytest.fixture(params=OURS)
def data(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OURS[request.param]()  # type: ignore[no-any-return]


def test_torchs_own_viewer_reads_it(data: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz as viz

    assert "<script" in viz.trace_plot(data)
    assert "<script" in viz.segment_plot(data)
    assert viz.segsum(data)
    assert viz.trace(data)


def events(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for trace in data["device_traces"]:
        yield from trace


def test_mosaic_finds_what_it_reads(data: dict[str, Any]) -> None:
    """libmosaic: TraceEvent.from_raw, Frame, and the two walks over segments."""
    assert isinstance(data["external_annotations"], list)
    for event in events(data):
        frames = event.get("frames", [])
        assert all(set(frame) == {"name", "filename", "line"} for frame in frames)  # Frame(**frame)
        assert type(event["time_us"]) is int
        if event["action"] != "oom":
            assert all(type(event[key]) is int for key in ("addr", "size", "stream"))
    addresses = [block["address"] for each in data["segments"] for block in each["blocks"]]
    assert len(addresses) == len(set(addresses))
    assert all("state" in block for each in data["segments"] for block in each["blocks"])


@pytest.mark.skipif(find_spec("pt_snap_cli") is None, reason="pt-snap-cli is not installed")
def test_pt_snap_imports_it(data: dict[str, Any], tmp_path: Path) -> None:
    """Its import replays every event backwards from the segments, and fails where one is amiss."""
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(data, protocol=4))
    command = ["import", str(path), "-o", str(tmp_path / "db"), "--no-focus", "--json"]
    done = python("-c", PT_SNAP, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("db/**/*.db"))
