"""Programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with these arguments; return how it ended and what it said."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
