"""Draws a Picture as one HTML page with plotly (optional: vramx[plot]).

The page carries plotly's script (about 5 MB), so it opens without a network and can be sent on.
"""

from __future__ import annotations

from typing import Any

from vramx.errors import MissingDependencyError
from vramx.memory.plot import COLOURS, EXTENT_COLOURS, EXTENT_LABELS, Extent, Picture
from vramx.sizes import GIB, MIB, format_gib, format_size


def render_html(picture: Picture) -> bytes:
    """Return the picture as a self-contained page, UTF-8.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingDependencyError(
            "an HTML page needs plotly; install it with: pip install vramx[plot]"
        ) from None
    figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[0.6, 0.4],
        vertical_spacing=0.12,
        subplot_titles=("memory over time", picture.map_title),
    )
    for line in _lines(go, picture):
        figure.add_trace(line, row=1, col=1)
    for kind in EXTENT_LABELS:
        extents = [extent for extent in picture.extents if extent.kind == kind]
        if extents:
            figure.add_trace(_bars(go, kind, extents, picture), row=2, col=1)
    _label(figure, picture)
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page.encode()


def _lines(go: Any, picture: Picture) -> list[Any]:
    live = next(result.timeline for result in picture.results if result.timeline is not None)
    lines = [
        go.Scatter(
            x=live.time_us / 1e6,
            y=live.live_bytes / GIB,
            name="live",
            fill="tozeroy",
            line={"color": COLOURS["live"], "width": 1},
        )
    ]
    for result in picture.results:
        if result.policy == "live" or result.timeline is None:
            continue
        lines.append(
            go.Scatter(
                x=result.timeline.time_us / 1e6,
                y=result.timeline.reserved_bytes / GIB,
                name=f"{result.policy}: {format_gib(result.peak_reserved_bytes)} reserved",
                line={"color": COLOURS[result.policy], "width": 2},
            )
        )
    return lines


def _bars(go: Any, kind: str, extents: list[Extent], picture: Picture) -> Any:
    return go.Bar(
        orientation="h",
        base=[extent.offset_bytes / MIB for extent in extents],
        x=[extent.size_bytes / MIB for extent in extents],
        y=[extent.row * picture.row_bytes / GIB for extent in extents],
        width=0.84 * picture.row_bytes / GIB,
        marker={
            "color": [EXTENT_COLOURS[kind][extent.shade] for extent in extents],
            "line": {"width": 0},
        },
        name=EXTENT_LABELS[kind],
        hovertext=[
            f"{EXTENT_LABELS[kind]}, {format_size(extent.extent_bytes)} "
            f"at {format_size(extent.address)}"
            for extent in extents
        ],
        hoverinfo="text",
    )


def _label(figure: Any, picture: Picture) -> None:
    figure.update_layout(
        title=picture.title, template="plotly_white", barmode="overlay", height=950, bargap=0
    )
    figure.update_xaxes(title_text="seconds", row=1, col=1)
    figure.update_yaxes(title_text="GiB", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(
        title_text="MiB from the start of the row",
        range=[0, picture.row_bytes / MIB],
        row=2,
        col=1,
    )
    figure.update_yaxes(
        title_text="GiB from the start of the arena", autorange="reversed", row=2, col=1
    )
