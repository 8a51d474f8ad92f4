"""`vramx plot` and `vramx demo`: what they draw, print and write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from samples import SMALL, assert_one_line_refusal

from vramx.memory.plot import take_picture
from vramx.memory.trace import load_trace


@pytest.mark.usefixtures("core")
def test_plot_writes_a_png(run: Any, traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, err = run("plot", traces / SMALL, "-o", tmp_path / "picture.png")
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


@pytest.mark.parametrize(
    ("arguments", "what"), [([], "-o FILE.png"), (["-o", "x.svg"], "x.svg: the name ends in")]
)
def test_plot_needs_a_name_that_says_the_format(
    run: Any, traces: Path, arguments: list[str], what: str
) -> None:
    code, out, err = run("plot", traces / SMALL, *arguments)
    assert_one_line_refusal(code, out, err, what)


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
def test_demo_prints_two_tables_and_draws_a_picture(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, out, err = run("demo")
    assert (code, err) == (0, "")
    for name in ("llama_varlen.npz", "unet3d_patch.npz"):
        assert f"{name}: " in out
    assert "vramx takes 32.594 GiB" in " ".join(out.split())
    assert [path.name for path in tmp_path.iterdir()] == ["vramx-demo.png"]


@pytest.mark.usefixtures("stand_in")
def test_demo_without_matplotlib_goes_without_a_picture(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run("demo")
    assert code == 0
    assert "unet3d_patch.npz: " in out
    assert "no picture is drawn" in err
    assert not list(tmp_path.iterdir())
