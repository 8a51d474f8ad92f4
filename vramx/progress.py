"""Progress of long work on stderr, where that is a terminal and this is the job's first process.

Replays, searches, plans and the first compilation report here; nothing else outside of the command
line writes anything. A bar appears once the work has taken a second, is drawn only when its work
reports, so that no thread disturbs what is being timed, and is gone when the work is done. rich is
imported when the first bar appears.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from vramx import config

_DELAY_S = 1.0
_INTERVAL_S = 0.1  # between two drawings


class ProgressBar:
    """A bar; a context manager, which takes the bar away.

    Args:
        delay_s: how long the work takes before there is one; 0 where it is known to be long.
    """

    def __init__(self, delay_s: float = _DELAY_S) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty() and not config.rank()
        self._next_s = time.monotonic() + delay_s
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, label: str, done: int, total: int) -> None:
        """Say what is being done, and how much of it is done."""
        now_s = time.monotonic()
        if not self._is_shown or now_s < self._next_s:
            return
        self._next_s = now_s + _INTERVAL_S
        if self._bar is None:
            self._open()
        self._bar.update(self._task, description=label, completed=done, total=total, refresh=True)

    def reporter(self, label: str) -> Callable[[str, int, int], None]:
        """Return a callback for a replay of `label`, called with policy, events done and all.

        It is called from the core's replay; being Python, it is also where Ctrl-C gets through.
        """
        return lambda policy, done, total: self.show(f"{label} {policy}", done, total)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()
