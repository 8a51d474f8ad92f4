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

import vramx
from benchmarks import plot
from benchmarks.documents.results import Run
from benchmarks.documents.tables import TABLES
from benchmarks.harness import ROOT
from vramx.memory.plot import take_picture
from vramx.memory.plot_png import render_png

FOLDER = ROOT / "docs" / "images"
RECORDED = ROOT / "vramx" / "demo" / "llama_varlen.npz"
# Of a table's run: what a table shows and its picture does are the same.
OF_TABLES = {"fused-llama": "fused", "language": "language_model"}
_COLOURS = 48


def main() -> int:
    """Draw all of them."""
    FOLDER.mkdir(exist_ok=True)
    picture = take_picture(vramx.load_trace(RECORDED))
    for name, part in {"timeline": "timelines", "arena": "map"}.items():
        _write(name, render_png(picture, only=(part,)))
    with TemporaryDirectory() as folder:
        for table, name in OF_TABLES.items():
            target = Path(folder) / f"{name}.png"
            plot.draw(_rows(TABLES[table].run(), TABLES[table].source), target)
            _write(name, target.read_bytes())
    return 0


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
