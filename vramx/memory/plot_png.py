"""Draws a Picture as PNG with matplotlib (optional: vramx[plot]).

Uses matplotlib's objects and not pyplot, so that no window system is needed and no global state
changes. About a second and 1 MB of pixels a picture.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

from vramx.errors import MissingDependencyError
from vramx.memory import plot
from vramx.memory.plot import Picture
from vramx.memory.plot_marks import unused_share
from vramx.sizes import GIB, MIB, format_gib

_INCHES = {"timelines": 5.4, "categories": 4.0, "unused": 2.6, "map": 3.8}


def render_png(picture: Picture, only: Collection[str] = _INCHES) -> bytes:
    """Return the picture as PNG.

    Args:
        only: the parts to draw, of those that the picture has.

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
    parts = {
        "timelines": _draw_timelines,
        **({"categories": _draw_categories} if picture.layers else {}),
        **({"unused": _draw_unused} if picture.lines else {}),
        "map": draw_map,
    }
    parts = {name: draw for name, draw in parts.items() if name in only}
    heights = [_INCHES[name] for name in parts]
    figure = Figure(figsize=(12, sum(heights)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(parts), 1, height_ratios=heights, squeeze=False)
    figure.suptitle(_plain(picture.title))
    for each, draw in zip(axes[:, 0], parts.values(), strict=True):
        draw(each, picture)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _plain(text: str) -> str:
    """Return text in which nothing is taken for a formula."""
    return text.replace("$", r"\$")


def _draw_timelines(axes: Any, picture: Picture) -> None:
    live = next(result.timeline for result in picture.results if result.timeline is not None)
    seconds = live.time_us / 1e6
    axes.fill_between(seconds, live.live_bytes / GIB, color=plot.COLOURS["live"], alpha=0.35, lw=0)
    axes.plot(seconds, live.live_bytes / GIB, color=plot.COLOURS["live"], lw=0.6, label="live")
    for result in picture.lines:
        assert result.timeline is not None
        axes.plot(
            result.timeline.time_us / 1e6,
            result.timeline.reserved_bytes / GIB,
            color=plot.COLOURS[result.policy],
            lw=1.4,
            label=f"{result.policy}: {format_gib(result.peak_reserved_bytes)} reserved",
        )
    if picture.limit is not None:
        axes.axhline(
            picture.limit.at / GIB,
            color=plot.LIMIT_COLOUR,
            lw=1.4,
            ls="--",
            label=picture.limit.text,
        )
    _finish(axes, picture, "GiB", plot.TIMELINE_WORDS)


def _draw_categories(axes: Any, picture: Picture) -> None:
    colours = [
        plot.CATEGORY_COLOURS[i % len(plot.CATEGORY_COLOURS)] for i in range(len(picture.layers))
    ]
    axes.stackplot(
        picture.layers[0].time_us / 1e6,
        *(layer.live_bytes / GIB for layer in picture.layers),
        labels=[_plain(layer.name) for layer in picture.layers],
        colors=colours,
        lw=0,
    )
    _finish(axes, picture, "GiB live", plot.CATEGORY_WORDS)


def _draw_unused(axes: Any, picture: Picture) -> None:
    for result in picture.lines:
        assert result.timeline is not None
        axes.plot(
            result.timeline.time_us / 1e6,
            unused_share(result),
            color=plot.COLOURS[result.policy],
            lw=1,
            label=result.policy,
        )
    _finish(axes, picture, "% of what is held", plot.UNUSED_WORDS)


def _finish(axes: Any, picture: Picture, unit: str, words: str) -> None:
    """Draw what belongs to moments, then the axes and the words."""
    for index, pause in enumerate(picture.pauses):
        axes.axvspan(
            pause.begin_us / 1e6,
            pause.end_us / 1e6,
            color=plot.PAUSE_COLOUR,
            alpha=0.4,
            lw=0,
            label="nothing allocated or freed" if not index else None,
        )
    for index, failure in enumerate(picture.failures):
        is_last = index == len(picture.failures) - 1
        label = failure.text if is_last else None
        axes.axvline(failure.at / 1e6, color=plot.MARK_COLOUR, lw=1.6, ls=":", label=label)
    axes.set(ylabel=unit)
    axes.set_xlabel(f"seconds\n{words}", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=9)


def draw_map(axes: Any, picture: Picture) -> None:
    """Draw the extents of an arena into axes, with their legend below."""
    from matplotlib.patches import Patch

    for row in range(picture.rows):
        extents = [extent for extent in picture.extents if extent.row == row]
        axes.broken_barh(
            [(extent.offset_bytes / MIB, extent.size_bytes / MIB) for extent in extents],
            (row - 0.42, 0.84),
            facecolors=[plot.EXTENT_COLOURS[extent.kind][extent.shade] for extent in extents],
            linewidth=0,
        )
    kinds = [kind for kind in plot.EXTENT_LABELS if any(e.kind == kind for e in picture.extents)]
    axes.legend(
        handles=[
            Patch(color=plot.EXTENT_COLOURS[kind][0], label=plot.EXTENT_LABELS[kind])
            for kind in kinds
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        ncols=len(plot.EXTENT_LABELS),
        frameon=False,
    )
    ticks = list(range(0, picture.rows, 4))
    axes.set_yticks(ticks, [f"{row * picture.row_bytes / GIB:.1f} GiB" for row in ticks])
    axes.set_ylim(picture.rows - 0.5, -0.5)
    axes.set_xlim(0, picture.row_bytes / MIB)
    axes.set_xlabel(f"MiB from the start of the row\n{plot.MAP_WORDS}", fontsize=9)
    axes.set_title(picture.map_title)
