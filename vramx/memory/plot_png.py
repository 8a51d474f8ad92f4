"""Draws a Picture as PNG with matplotlib (optional: vramx[plot]).

Uses matplotlib's objects and not pyplot, so that no window system is needed and no global state
changes. About a second and 1 MB of pixels a picture.
"""

from __future__ import annotations

import io
from typing import Any

from vramx.errors import MissingDependencyError
from vramx.memory.plot import COLOURS, EXTENT_COLOURS, EXTENT_LABELS, Picture
from vramx.sizes import GIB, MIB, format_gib


def render_png(picture: Picture) -> bytes:
    """Return the picture as PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "a PNG needs matplotlib; install it with: pip install vramx[plot]"
        ) from None
    figure = Figure(figsize=(12, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    over_time, arena = figure.subplots(2, 1, height_ratios=(3, 2))
    figure.suptitle(f"{picture.title}, memory over time")
    _draw_timelines(over_time, picture)
    _draw_map(arena, picture)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _draw_timelines(axes: Any, picture: Picture) -> None:
    live = next(result.timeline for result in picture.results if result.timeline is not None)
    seconds = live.time_us / 1e6
    axes.fill_between(seconds, live.live_bytes / GIB, color=COLOURS["live"], alpha=0.35, lw=0)
    axes.plot(seconds, live.live_bytes / GIB, color=COLOURS["live"], lw=0.6, label="live")
    for result in picture.results:
        if result.policy == "live" or result.timeline is None:
            continue
        axes.plot(
            result.timeline.time_us / 1e6,
            result.timeline.reserved_bytes / GIB,
            color=COLOURS[result.policy],
            lw=1.4,
            label=f"{result.policy}: {format_gib(result.peak_reserved_bytes)} reserved",
        )
    axes.set(xlabel="seconds", ylabel="GiB")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _draw_map(axes: Any, picture: Picture) -> None:
    from matplotlib.patches import Patch

    for row in range(picture.rows):
        extents = [extent for extent in picture.extents if extent.row == row]
        axes.broken_barh(
            [(extent.offset_bytes / MIB, extent.size_bytes / MIB) for extent in extents],
            (row - 0.42, 0.84),
            facecolors=[EXTENT_COLOURS[extent.kind][extent.shade] for extent in extents],
            linewidth=0,
        )
    kinds = [kind for kind in EXTENT_LABELS if any(e.kind == kind for e in picture.extents)]
    axes.legend(
        handles=[Patch(color=EXTENT_COLOURS[kind][0], label=EXTENT_LABELS[kind]) for kind in kinds],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=len(EXTENT_LABELS),
        frameon=False,
    )
    ticks = list(range(0, picture.rows, 4))
    axes.set_yticks(ticks, [f"{row * picture.row_bytes / GIB:.1f} GiB" for row in ticks])
    axes.set_ylim(picture.rows - 0.5, -0.5)
    axes.set_xlim(0, picture.row_bytes / MIB)
    axes.set(xlabel="MiB from the start of the row", title=picture.map_title)
