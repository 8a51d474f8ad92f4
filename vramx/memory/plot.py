"""The picture of a run: memory over time for each policy and category, and a map of the arena.

This file decides what is drawn and collects it; plot_png.py and plot_html.py draw it, with
matplotlib and with plotly, which are optional and imported on use. Rendering returns bytes and
writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from vramx.errors import InvalidValueError
from vramx.memory.plot_marks import Layer, Mark, Pause, failures_in, layers_of, limit_of, pauses_in
from vramx.memory.replay import (
    POLICIES,
    ReplayOptions,
    ReplayResult,
    check_capacity,
    check_policies,
    open_replay,
    replay,
)
from vramx.memory.snapshot import Snapshot
from vramx.memory.trace import Trace
from vramx.sizes import MIB, format_gib

FORMATS = ("png", "html")
COLOURS = {"live": "#9aa0a6", "native": "#d9822b", "expandable": "#3b7dd8", "vramx": "#1b9e63"}
# Two shades a kind, so that neighbours of one kind can be told apart without drawing edges.
EXTENT_COLOURS = {
    "block": ("#1b9e63", "#57c194"),
    "alias": ("#7b5cc4", "#a994dd"),
    "free": ("#eceff1", "#eceff1"),
}
EXTENT_LABELS = {"block": "block", "alias": "block mapped a second time", "free": "free"}
CATEGORY_COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1"),
    *("#76b7b2", "#edc948", "#9c755f", "#bab0ac", "#d37295"),
)
MARK_COLOUR, LIMIT_COLOUR, PAUSE_COLOUR = "#c5221f", "#5f6368", "#c9ced6"
# One sentence below each part.
TIMELINE_WORDS = (
    "Live is what the tensors take, the lines are what each allocator holds for them; grey bands "
    "are stretches of time in which nothing was allocated or freed."
)
CATEGORY_WORDS = "What the live memory was for; the layers add up to what is live."
UNUSED_WORDS = (
    "Of what each allocator holds, the share that is in no tensor: cache, fragmentation, rounding."
)
MAP_WORDS = (
    "Rows follow each other as lines of text do; two shades of a colour only tell neighbours apart."
)
_SAMPLES = 1500  # more than a picture has columns; a bucket shows its maximum, so no peak is lost
_MAP_ROWS = 24
_CHUNK_BYTES = 2 * MIB


@dataclass(frozen=True)
class Extent:
    """A piece of the arena in one row of the map; offsets count from the row's start."""

    row: int
    offset_bytes: int
    size_bytes: int
    kind: str
    shade: int
    address: int  # of the whole extent, in mapped bytes from the arena's start
    extent_bytes: int  # of the whole extent, which may go on in the next row


@dataclass(frozen=True)
class Picture:
    """All that is drawn, as plain data."""

    title: str
    results: Sequence[ReplayResult]  # each with a timeline
    extents: Sequence[Extent]
    row_bytes: int
    rows: int
    failures: Sequence[Mark] = ()
    limit: Mark | None = None
    pauses: Sequence[Pause] = ()
    layers: Sequence[Layer] = ()  # by category, where the recording has them

    @property
    def lines(self) -> list[ReplayResult]:
        """The results of allocators, which hold more than is live."""
        return [each for each in self.results if each.policy != "live"]

    @property
    def map_title(self) -> str:
        """Say what the map shows, with the bytes of each kind."""
        totals = dict.fromkeys(EXTENT_LABELS, 0)
        for extent in self.extents:
            totals[extent.kind] += extent.size_bytes
        shares = ", ".join(f"{format_gib(size)} {kind}" for kind, size in totals.items() if size)
        return f"vramx: the arena when the most is live ({shares or 'empty'})"


def take_picture(
    source: Trace | Snapshot,
    policies: Iterable[str] = POLICIES,
    options: ReplayOptions | None = None,
    *,
    capacity: int | str | None = None,
) -> Picture:
    """Replay a recording under each policy and collect what its picture shows.

    Args:
        source: a snapshot also shows the limit, and what memory was for where it has that.
        capacity: the limit to draw, where it is known better than a snapshot tells it.

    Raises:
        InvalidValueError, TraceError, MissingDependencyError: as vramx.replay does.

    Example:
        >>> picture = take_picture(load_trace("train.npz"))     # doctest: +SKIP
        >>> Path("train.png").write_bytes(render(picture, "png"))    # doctest: +SKIP
    """
    given_bytes = check_capacity(capacity)
    snapshot = source if isinstance(source, Snapshot) else None
    trace = source.trace if isinstance(source, Snapshot) else source
    options = replace(options or ReplayOptions(), samples=_SAMPLES)
    results = replay(trace, check_policies(policies), options=options)
    layout = open_replay(trace).layout()
    # One after the other: what no memory is mapped to, as between the zones, is left out.
    layout = sorted(layout, key=lambda piece: piece["address"])
    ends = [0, *accumulate(piece["size"] for piece in layout)]
    row_bytes = max(-(-ends[-1] // (_MAP_ROWS * _CHUNK_BYTES)), 1) * _CHUNK_BYTES
    pieces = [
        (begin, piece["size"], piece["kind"]) for begin, piece in zip(ends, layout, strict=False)
    ]
    return Picture(
        title=f"{trace.name}: {results[0].events:,} events",
        results=results,
        extents=_wrap(pieces, row_bytes),
        row_bytes=row_bytes,
        rows=max(-(-ends[-1] // row_bytes), 1),
        failures=failures_in(trace),
        limit=limit_of(snapshot, given_bytes),
        pauses=pauses_in(trace),
        layers=layers_of(snapshot, _SAMPLES),
    )


def render(picture: Picture, format_name: str) -> bytes:
    """Draw a picture as a "png" (matplotlib) or as one self-contained "html" page (plotly).

    Raises:
        InvalidValueError: the format is another.
        MissingDependencyError: the library that draws it is not installed.
    """
    if format_name == "png":
        from vramx.memory.plot_png import render_png

        return render_png(picture)
    if format_name == "html":
        from vramx.memory.plot_html import render_html

        return render_html(picture)
    raise InvalidValueError(f"format {format_name!r} is unknown; accepted are {', '.join(FORMATS)}")


def _wrap(pieces: Iterable[tuple[int, int, str]], row_bytes: int) -> list[Extent]:
    """Cut extents where the map's rows end, as text is wrapped."""
    wrapped = []
    for index, (address, size, kind) in enumerate(pieces):
        position, end = address, address + size
        while position < end:
            row, offset = divmod(position, row_bytes)
            taken = min(end - position, row_bytes - offset)
            wrapped.append(Extent(row, offset, taken, kind, index % 2, address, size))
            position += taken
    return wrapped
