"""Programs until one fails, and then the smallest that does: hypothesis draws and shrinks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import hypothesis
from hypothesis import HealthCheck, Phase

from tests.fuzz.compare import FaultError, check
from tests.fuzz.grammar import programs
from tests.fuzz.run import UnusableError
from tests.fuzz.settings import Setting


@dataclass
class Found:
    """What a search saw: how many programs were compared, which were not, and a fault."""

    checked: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    fault: str = ""
    source: str = ""

    def __str__(self) -> str:
        if not self.fault:
            return f"{self.checked} programs, no fault"
        return f"{self.source}\n# {self.fault}"


def search(
    count: int, seed: int, *, names: Collection[str] | None = None, shrink: bool = True
) -> Found:
    """Check that many programs; stop at the first that fails, and make that one small."""
    found = Found()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(programs(names))
    def examine(program: tuple[str, Setting]) -> None:
        source, setting = program
        try:
            check(source, setting)
        except UnusableError as reason:
            found.unusable[str(reason)[:100]] += 1
            hypothesis.reject()
        except FaultError as fault:
            # The last that fails is the smallest: hypothesis runs it once more.
            found.fault, found.source = str(fault), printed(source, setting)
            raise
        found.checked += 1

    with contextlib.suppress(FaultError, hypothesis.errors.FlakyFailure):
        examine()
    return found


def printed(source: str, setting: Setting) -> str:
    """Return a program as Python that runs by itself and fails."""
    return (
        f"{source}\n\nif __name__ == '__main__':\n"
        "    from tests.fuzz.compare import check\n"
        "    from tests.fuzz.settings import Setting\n\n"
        f"    check(Program, {setting})\n"
    )
