"""Asks for every link of README.md and docs/ to another site; names those that are not answered.

Exits 1 where one is not. It needs a network, so it is no part of .ci/run.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"https?://[^\s)>\"'`]+")
_LIMIT_S = 20


def main() -> int:
    """Ask for each link once."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {link: page for page in pages for link in _LINK.findall(page.read_text())}
    broken = {link: reason for link in found if (reason := ask(link))}
    for link, reason in broken.items():
        print(f"{found[link].relative_to(ROOT)}: {link}: {reason}", file=sys.stderr)
    return int(bool(broken))


def ask(link: str) -> str:
    """Return why a link is not answered, or nothing."""
    request = urllib.request.Request(link, headers={"User-Agent": "vramx-links"})
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S):
            return ""
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
