"""What is known of a model that is planned: its timeline, and the steps that were run. Values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from vramx.planning.blocks import Block
from vramx.planning.choice import Arrangement
from vramx.planning.meters import Spread
from vramx.planning.timeline import Timeline


@dataclass
class Run:
    """An arrangement that was run. `measured_bytes` is None if it ran out of memory.

    `predicted_bytes` is what was predicted just before, corrected by what runs before it had shown;
    `measured_ms` rests on several timings, in turns, where another run was about as fast.
    """

    arrangement: Arrangement
    predicted_bytes: int
    measured_bytes: int | None
    measured_ms: float


@dataclass(frozen=True)
class Before:
    """A step of the model as it is; no peak: it ran out of memory, or was not run."""

    peak_bytes: int | None
    step_ms: float
    reason: str = ""


@dataclass
class Measured:
    """What is known of a model: its blocks, its timeline, and the arrangements that were run.

    `spread` is its meter's; `dropped` says which words are not for which blocks, and why.
    """

    model: nn.Module
    blocks: Sequence[Block]
    timeline: Timeline
    spread: Spread
    before: Before
    dropped: Sequence[str] = ()
    runs: dict[tuple[str, ...], Run] = field(default_factory=dict)

    def words(self, arrangement: Arrangement) -> dict[Block, str]:
        """Return the word of each block that the step calls."""
        calls = zip(self.timeline.places, arrangement.words, strict=True)
        return {self.blocks[place.block]: word for place, word in calls}

    def within(self, limit_bytes: float) -> list[Run]:
        """Return the runs that were seen to fit."""
        return [
            run
            for run in self.runs.values()
            if run.measured_bytes is not None and run.measured_bytes <= limit_bytes
        ]
