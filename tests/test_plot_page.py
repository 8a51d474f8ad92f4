"""The page of `vramx plot` in a browser: it draws without a network and can be clicked through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Page, browser, executable
from samples import SMALL

from vramx.memory.plot import Picture, render, take_picture
from vramx.memory.plot_marks import category_layers
from vramx.memory.snapshot import Snapshot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(
        executable() is None, reason="no Chromium on this machine; apt-get install chromium"
    ),
]


@pytest.fixture
def compiled() -> None:
    pytest.importorskip("vramx._core", reason="the compiled core is not built")
    pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as shown:
        yield shown


def picture_of(snapshots: Path) -> Picture:
    """A picture with all of its parts."""
    snapshot = Snapshot.load(snapshots / "oom.pickle")
    names = ["", "parameters", "</script><b>activations</b>"]
    categories = np.arange(len(snapshot.allocations.size)) % len(names)
    layers = category_layers(snapshot.trace, categories, names, 500)
    picture = take_picture(snapshot)
    return Picture(**{**vars(picture), "layers": layers})


def check(page: Page) -> None:
    assert page.requests == []
    assert page.complaints == []


def visible(page: Page, part: int, name: str) -> Any:
    """Return what plotly holds of a trace's visibility."""
    return page.evaluate(
        f"document.getElementById('part-{part}').data.find(t => t.name.includes('{name}')).visible"
    )


def entry(part: int, name: str) -> str:
    return (
        f"[...document.querySelectorAll('#part-{part} .legend .traces')]"
        f".find(e => e.textContent.includes('{name}')).querySelector('.legendtoggle')"
    )


def button(part: int, title: str) -> str:
    return f"document.querySelector('#part-{part} [data-title=\"{title}\"]')"


def test_every_part_draws_and_can_be_clicked_through(
    page: Page, snapshots: Path, tmp_path: Path
) -> None:
    path = tmp_path / "oom.html"
    path.write_bytes(render(picture_of(snapshots), "html"))
    page.open(path)
    drawn = "document.querySelectorAll('.plotly-graph-div .subplot.xy').length"
    page.wait_for(f"{drawn} >= 4")
    headings = page.evaluate("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert headings[:3] == ["Memory over time", "What it was for", "Unused over time"]
    assert headings[3].startswith("vramx: the arena when the most is live")
    legend = page.evaluate("document.querySelector('#part-0 .legend').textContent")
    for words in ("live", "native", "expandable", "vramx", "capacity", "out of memory"):
        assert words in legend
    assert "asked" in page.evaluate("document.querySelector('#part-0 .annotation').textContent")
    for part, name in ((0, "native"), (1, "parameters"), (2, "vramx"), (3, "free")):
        page.click(entry(part, name))
        # A click waits for a second one, which would show this trace alone.
        page.wait_for(
            f"document.getElementById('part-{part}').data.find(t => t.name.includes('{name}'))"
            ".visible === 'legendonly'"
        )
    assert visible(page, 0, "live") is None
    before = page.evaluate("document.getElementById('part-0').layout.xaxis.range.join()")
    page.click(button(0, "Zoom in"))
    page.wait_for(f"document.getElementById('part-0').layout.xaxis.range.join() !== '{before}'")
    page.click(button(0, "Reset axes"))
    page.wait_for(f"document.getElementById('part-0').layout.xaxis.range.join() === '{before}'")
    check(page)


@pytest.mark.parametrize("policy", ["live", "live,vramx"])
def test_the_page_of_a_trace_draws(
    page: Page, run: Any, traces: Path, tmp_path: Path, policy: str
) -> None:
    path = tmp_path / "small.html"
    assert run("plot", traces / SMALL, "--policy", policy, "-o", path)[0] == 0
    page.open(path)
    parts = 2 if policy == "live" else 3
    page.wait_for(f"document.querySelectorAll('.subplot.xy').length === {parts}")
    check(page)


def test_a_name_in_the_file_is_text_and_no_markup(
    page: Page, snapshots: Path, tmp_path: Path
) -> None:
    picture = picture_of(snapshots)
    title = "</script><script>document.bad = 1</script><img src=x onerror='document.bad = 1'>"
    path = tmp_path / "named.html"
    path.write_bytes(render(Picture(**{**vars(picture), "title": title}), "html"))
    page.open(path)
    assert page.evaluate("document.querySelector('h1').textContent") == title
    assert page.evaluate("document.bad") is None
    check(page)


def test_a_page_that_complains_or_loads_is_noticed(page: Page, tmp_path: Path) -> None:
    """The defects that the tests above must see."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<script>console.error('wrong')</script><script>throw Error('worse')</script>"
        "<script src='https://example.invalid/plotly.js'></script>"
    )
    page.open(path)
    page.wait_for("document.readyState === 'complete'")
    assert any("wrong" in each for each in page.complaints)
    assert any("worse" in each for each in page.complaints)
    assert page.requests == ["https://example.invalid/plotly.js"]
