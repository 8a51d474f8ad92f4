"""`vramx plot` and `vramx demo`: what they draw, print and write."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import SMALL, assert_one_line_refusal
from snapshot_writer import KEPT, MIB, MINORS, Recording

from vramx.memory.plot import take_picture
from vramx.memory.plot_marks import category_layers, pauses_in, unused_share
from vramx.memory.replay import Timeline
from vramx.memory.snapshot import Snapshot
from vramx.memory.trace import Trace, load_trace


@pytest.mark.slow
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("of_snapshot", [False, True], ids=["trace", "snapshot with its failure"])
def test_plot_writes_a_png(
    run: Any, traces: Path, snapshots: Path, tmp_path: Path, of_snapshot: bool
) -> None:
    pytest.importorskip("matplotlib")
    what = (snapshots / "oom.pickle", "--capacity", "4GiB") if of_snapshot else (traces / SMALL,)
    code, _, err = run("plot", *what, "-o", tmp_path / "picture.png")
    assert (code, err) == (0, "")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.usefixtures("core")
def test_plot_writes_a_page_that_needs_no_network(run: Any, traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    code, _, err = run("plot", traces / SMALL, "-o", tmp_path / "picture.html")
    page = (tmp_path / "picture.html").read_text()
    assert (code, err) == (0, "")
    assert SMALL in page
    assert "<script src=" not in page
    assert len(page) > 1_000_000  # plotly's own script is inside


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("suffix", "library"), [("png", "matplotlib.figure"), ("html", "plotly.graph_objects")]
)
def test_a_missing_library_is_named_with_its_remedy(
    run: Any, traces: Path, tmp_path: Path, monkeypatch: Any, suffix: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    code, out, err = run("plot", traces / SMALL, "-o", tmp_path / f"picture.{suffix}")
    assert_one_line_refusal(code, out, err, "pip install vramx[plot]")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("core")
def test_the_map_covers_the_arena_once(traces: Path) -> None:
    trace = load_trace(traces / SMALL)
    picture = take_picture(trace, ["live"])
    pieces = sorted((e.row, e.offset_bytes, e.size_bytes) for e in picture.extents)
    position = 0
    for row, offset_bytes, size_bytes in pieces:
        assert row * picture.row_bytes + offset_bytes == position
        position += size_bytes
    in_use = sum(e.size_bytes for e in picture.extents if e.kind != "free")
    assert position >= in_use >= picture.results[0].peak_live_bytes


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_demo_prints_two_tables_and_draws_a_picture_where_it_can(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_matplotlib: bool
) -> None:
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("demo")
    assert code == 0
    assert all(f"{name}.npz: " in out for name in ("llama_varlen", "unet3d_patch"))
    assert "vramx takes 32.594 GiB" in " ".join(out.split())
    drawn = [path.name for path in tmp_path.iterdir()]
    if has_matplotlib:
        assert (drawn, err) == (["vramx-demo.png"], "")
    else:
        assert drawn == []
        assert "no picture is drawn" in err


@pytest.mark.usefixtures("core")
def test_a_failure_and_the_capacity_are_marked(snapshots: Path, traces: Path) -> None:
    snapshot = Snapshot.load(snapshots / "oom.pickle")
    picture = take_picture(snapshot, ["live"])
    (failure,) = snapshot.failures
    assert [mark.text for mark in picture.failures] == ["out of memory: 512.00 MiB asked"]
    row = int(np.flatnonzero(snapshot.trace.id == failure.id)[0])
    assert picture.failures[0].at == snapshot.trace.time_us[row]
    assert picture.limit is not None
    assert "capacity between 2.785 GiB and 3.115 GiB" in picture.limit.text
    given = take_picture(snapshot, ["live"], capacity="3GiB")
    assert given.limit is not None
    assert given.limit.at == 3 << 30
    plain = take_picture(load_trace(traces / SMALL), ["live"])
    assert (plain.failures, plain.limit, plain.layers) == ((), None, ())


def trace_at(*times_us: int) -> Trace:
    times = np.array(times_us, np.uint32)
    zeros, ids = np.zeros(times.shape, np.uint8), np.arange(len(times), dtype=np.uint32)
    return Trace("made", zeros, ids, np.full(times.shape, 512, np.uint64), zeros.copy(), times)


def test_a_long_stretch_without_events_is_a_pause_and_a_short_one_is_none() -> None:
    busy = [*range(100), *range(5000, 5100), *range(5200, 5300)]
    assert [(each.begin_us, each.end_us) for each in pauses_in(trace_at(*busy))] == [(99, 5000)]
    assert pauses_in(trace_at(*range(0, 3000, 10))) == ()
    assert pauses_in(trace_at(0, 1, 1000)) == ()  # of so few events everything is one
    assert pauses_in(trace_at(7, 7)) == ()


def test_layers_add_up_to_what_is_live_when_the_most_is(snapshots: Path) -> None:
    snapshot = Snapshot.load(snapshots / "train.pickle")
    names = ["", "parameters", "activations"]
    categories = np.arange(len(snapshot.allocations.size)) % len(names)
    layers = category_layers(snapshot.trace, categories, names, 100)
    assert [layer.name for layer in layers] == ["(not recorded)", "parameters", "activations"]
    total = sum(layer.live_bytes for layer in layers)
    assert total.max() == snapshot.live_bytes_at(snapshot.peak_event)
    assert len(layers[0].time_us) == 100
    assert min(int(layer.live_bytes.min()) for layer in layers) >= 0


@pytest.mark.usefixtures("core")
def test_unused_is_the_share_of_what_is_held_that_is_not_live(traces: Path) -> None:
    (result,) = take_picture(load_trace(traces / SMALL), ["native"]).lines
    live, held = np.array([0, 30, 100, 7], np.uint64), np.array([0, 40, 100, 5], np.uint64)
    line = Timeline(np.arange(4.0), live, held)
    # Nothing held is nothing unused; a bucket may have more live than a model holds.
    assert unused_share(replace(result, timeline=line)).tolist() == [0, 25, 0, 0]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("minor", [MINORS[0], 11, 12, MINORS[-1]])
def test_a_snapshot_of_each_release_is_plotted(run: Any, tmp_path: Path, minor: int) -> None:
    pytest.importorskip("plotly")
    recording = Recording(minor)
    for _ in range(4):
        recording.free(recording.alloc(30 * MIB))
        recording.alloc(5 * MIB, KEPT, stream=7)
    recording.oom(40 * MIB, device_free=MIB)
    path, output = recording.save(tmp_path / "run.pickle"), tmp_path / "run.html"
    code, _, err = run("plot", path, "-o", output)
    assert (code, err) == (0, "")
    assert "out of memory: 40.00 MiB asked" in output.read_text()
