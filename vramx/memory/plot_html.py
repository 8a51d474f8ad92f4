"""Draws a Picture as one HTML page with plotly (optional: vramx[plot]).

The page carries plotly's script (about 5 MB), so it opens without a network and can be sent on.
Each part is a figure of its own under a heading, with a sentence that says how to read it.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from vramx.errors import MissingDependencyError
from vramx.memory import plot
from vramx.memory.plot import Extent, Picture
from vramx.memory.plot_marks import unused_share
from vramx.sizes import GIB, MIB, format_gib, format_size

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; color: #202124; margin: 1em auto; max-width: 1400px; }}
h1 {{ font-size: 1.3em; }} h2 {{ font-size: 1.1em; margin: 1.5em 0 0.2em; }}
p {{ margin: 0; color: #5f6368; }}
</style>
</head>
<body>
<h1>{title}</h1>
{parts}
</body>
</html>
"""
# Of each kind of figure; plotly's own link would leave the page.
_CONFIG = {"displaylogo": False, "responsive": True}
_Part = tuple[str, str, Any]  # heading, sentence, figure


def render_html(picture: Picture) -> bytes:
    """Return the picture as a self-contained page, UTF-8.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingDependencyError(
            "an HTML page needs plotly; install it with: pip install vramx[plot]"
        ) from None
    parts = []
    for number, (heading, words, figure) in enumerate(_parts(go, picture)):
        figure.update_layout(template="plotly_white", margin={"t": 30, "b": 40})
        drawing = figure.to_html(
            full_html=False,
            include_plotlyjs=number == 0,  # once a page
            div_id=f"part-{number}",
            config=_CONFIG,
        )
        parts.append(f"<h2>{html.escape(heading)}</h2>\n<p>{html.escape(words)}</p>\n{drawing}")
    page = _PAGE.format(title=html.escape(picture.title), parts="\n".join(parts))
    return page.encode(errors="backslashreplace")


def _parts(go: Any, picture: Picture) -> Iterator[_Part]:
    yield "Memory over time", plot.TIMELINE_WORDS, _timelines(go, picture)
    if picture.layers:
        yield "What it was for", plot.CATEGORY_WORDS, _categories(go, picture)
    if picture.lines:
        yield "Unused over time", plot.UNUSED_WORDS, _unused(go, picture)
    yield picture.map_title, plot.MAP_WORDS, _map(go, picture)


def _timelines(go: Any, picture: Picture) -> Any:
    figure = go.Figure()
    live = next(result.timeline for result in picture.results if result.timeline is not None)
    figure.add_scatter(
        x=live.time_us / 1e6,
        y=live.live_bytes / GIB,
        name="live",
        fill="tozeroy",
        line={"color": plot.COLOURS["live"], "width": 1},
    )
    for result in picture.lines:
        assert result.timeline is not None
        figure.add_scatter(
            x=result.timeline.time_us / 1e6,
            y=result.timeline.reserved_bytes / GIB,
            name=f"{result.policy}: {format_gib(result.peak_reserved_bytes)} reserved",
            line={"color": plot.COLOURS[result.policy], "width": 2},
        )
    if picture.limit is not None:
        end_s = live.time_us[-1] / 1e6
        figure.add_scatter(
            x=[0, end_s],
            y=[picture.limit.at / GIB] * 2,
            mode="lines",
            name=picture.limit.text,
            line={"color": plot.LIMIT_COLOUR, "width": 2, "dash": "dash"},
        )
    _mark(figure, picture)
    _label(figure, "GiB")
    return figure


def _mark(figure: Any, picture: Picture) -> None:
    """Draw what belongs to moments, in every figure over time."""
    for pause in picture.pauses:
        figure.add_vrect(
            x0=pause.begin_us / 1e6,
            x1=pause.end_us / 1e6,
            fillcolor=plot.PAUSE_COLOUR,
            opacity=0.4,
            line_width=0,
            layer="below",
        )
    for failure in picture.failures:
        figure.add_vline(
            x=failure.at / 1e6,
            line={"color": plot.MARK_COLOUR, "width": 2, "dash": "dot"},
            annotation={"text": failure.text, "font": {"color": plot.MARK_COLOUR}},
        )
    # What a shape means, only a trace can say in the legend.
    meanings = [
        (bool(picture.pauses), "nothing allocated or freed", plot.PAUSE_COLOUR, "square"),
        (bool(picture.failures), "out of memory", plot.MARK_COLOUR, "line-ns-open"),
    ]
    for is_there, name, colour, symbol in meanings:
        if is_there:
            marker = {"color": colour, "symbol": symbol, "size": 12}
            figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker)


def _categories(go: Any, picture: Picture) -> Any:
    figure = go.Figure()
    for index, layer in enumerate(picture.layers):
        figure.add_scatter(
            x=layer.time_us / 1e6,
            y=layer.live_bytes / GIB,
            name=layer.name,
            stackgroup="live",
            line={"width": 0, "color": plot.CATEGORY_COLOURS[index % len(plot.CATEGORY_COLOURS)]},
        )
    _mark(figure, picture)
    _label(figure, "GiB live")
    return figure


def _unused(go: Any, picture: Picture) -> Any:
    figure = go.Figure()
    for result in picture.lines:
        assert result.timeline is not None
        figure.add_scatter(
            x=result.timeline.time_us / 1e6,
            y=unused_share(result),
            name=result.policy,
            line={"color": plot.COLOURS[result.policy], "width": 1.5},
        )
    _mark(figure, picture)
    _label(figure, "% of what is held")
    figure.update_layout(height=320)
    return figure


def _map(go: Any, picture: Picture) -> Any:
    figure = go.Figure()
    for kind in plot.EXTENT_LABELS:
        extents = [extent for extent in picture.extents if extent.kind == kind]
        if extents:
            figure.add_trace(_bars(go, kind, extents, picture))
    figure.update_layout(barmode="overlay", bargap=0, showlegend=True, height=450)
    figure.update_xaxes(
        title_text="MiB from the start of the row", range=[0, picture.row_bytes / MIB]
    )
    figure.update_yaxes(title_text="GiB from the start of the arena", autorange="reversed")
    return figure


def _bars(go: Any, kind: str, extents: list[Extent], picture: Picture) -> Any:
    return go.Bar(
        orientation="h",
        base=[extent.offset_bytes / MIB for extent in extents],
        x=[extent.size_bytes / MIB for extent in extents],
        y=[extent.row * picture.row_bytes / GIB for extent in extents],
        width=0.84 * picture.row_bytes / GIB,
        marker={
            "color": [plot.EXTENT_COLOURS[kind][extent.shade] for extent in extents],
            "line": {"width": 0},
        },
        name=plot.EXTENT_LABELS[kind],
        hovertext=[
            f"{plot.EXTENT_LABELS[kind]}, {format_size(extent.extent_bytes)} "
            f"at {format_size(extent.address)}"
            for extent in extents
        ],
        hoverinfo="text",
    )


def _label(figure: Any, unit: str) -> None:
    figure.update_layout(showlegend=True, height=480)
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(title_text=unit, rangemode="tozero")
