"""Draws the pictures of README.md and docs/ into docs/images; with fewer colours, to be small.

    python -m benchmarks.documents.pictures

They are drawn by `vramx plot`, of a recorded run that comes with vramx, and by benchmarks.plot, of
the tables' runs. Needs matplotlib. A third of a minute.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import vramx
from benchmarks import plot
from benchmarks.documents.results import Run
from benchmarks.documents.tables import TABLES
from benchmarks.harness import ROOT
from vramx.memory.plot import Extent, Picture, take_picture
from vramx.memory.plot_png import draw_map, render_png
from vramx.memory.replay import open_replay
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, FREE_REQUESTED, Trace
from vramx.sizes import MIB

FOLDER = ROOT / "docs" / "images"
RECORDED = ROOT / "vramx" / "demo" / "llama_varlen.npz"
# Of a table's run: what a table shows and its picture does are the same.
OF_TABLES = {"fused-llama": "fused", "language": "language_model"}
BLOCK_MIB = 64
_COLOURS = 48


def main() -> int:
    """Draw all of them."""
    FOLDER.mkdir(exist_ok=True)
    picture = take_picture(vramx.load_trace(RECORDED))
    for name, part in {"timeline": "timelines", "arena": "map"}.items():
        _write(name, render_png(picture, only=(part,)))
    _write("stitching", draw_stitching())
    with TemporaryDirectory() as folder:
        for table, name in OF_TABLES.items():
            target = Path(folder) / f"{name}.png"
            plot.draw(_rows(TABLES[table].run(), TABLES[table].source), target)
            _write(name, target.read_bytes())
    return 0


def draw_stitching() -> bytes:
    """Draw the arena before and after a request that is served by stitching.

    Of eight blocks three are freed, none beside another, and more is asked for than the three had.
    """
    kept = [(FREE_REQUESTED, number, BLOCK_MIB) for number in (1, 3, 5)]
    freed = [(FREE_COMPLETED, number, BLOCK_MIB) for _, number, _ in kept]
    made = [(ALLOCATE, number, BLOCK_MIB) for number in range(8)]
    layout = open_replay(_trace([*made, *kept, *freed, (ALLOCATE, 8, 4 * BLOCK_MIB)])).layout()
    start = min(piece["address"] for piece in layout)
    row_bytes = sum(piece["size"] for piece in layout)
    extents = []
    for index, piece in enumerate(sorted(layout, key=lambda piece: piece["address"])):
        offset, size = piece["address"] - start, piece["size"]
        # What the request takes was free before, but for what was not there.
        is_new = offset >= 8 * BLOCK_MIB * MIB
        before = "free" if piece["kind"] == "alias" else piece["kind"]
        for row, kind in enumerate((before, piece["kind"])):
            if row or not is_new:
                shade = 0 if kind == "alias" else index % 2  # all of it is one block
                extents.append(Extent(row, offset, size, kind, shade, offset, size))
    return _draw_rows(Picture("", [], extents, row_bytes, 2))


def _trace(events: list[tuple[int, int, int]]) -> Trace:
    op, number, size = (np.array(column) for column in zip(*events, strict=True))
    zeros = np.zeros(len(events), np.uint8)
    times = np.arange(len(events), dtype=np.uint32)
    sizes = (size * MIB).astype(np.uint64)
    return Trace("", op.astype(np.uint8), number.astype(np.uint32), sizes, zeros, times)


def _draw_rows(picture: Picture) -> bytes:
    figure = Figure(figsize=(12, 2.2), dpi=110, layout="constrained")
    axes: Any = figure.subplots()
    draw_map(axes, picture)
    axes.set_title("")
    axes.set_xlabel("MiB of the arena")
    axes.set_yticks([0, 1], ["three blocks are free", f"{4 * BLOCK_MIB} MiB are asked for"])
    axes.get_legend().set_bbox_to_anchor((0.5, -0.35))
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _rows(run: Run, source: str) -> list[dict[str, str]]:
    rows = [row for row in run.rows.values() if row["status"] == "ok"]
    # The ways of one model; those of others have no time to be drawn beside.
    return [row for row in rows if source != "fused" or row["case"].startswith("llama ")]


def _write(name: str, png: bytes) -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(_COLOURS).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    sys.exit(main())
