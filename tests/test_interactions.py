"""docs/interactions.md is what the tests of libraries hold."""

from __future__ import annotations

from pathlib import Path

import interactions

PAGE = Path(__file__).parent.parent / "docs" / "interactions.md"


def test_the_page_is_that_of_the_tests() -> None:
    assert PAGE.read_text() == interactions.page(), (
        "python tests/interactions.py > docs/interactions.md"
    )
