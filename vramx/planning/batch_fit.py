"""What fit_batch() returns: the batch, how it was found, and a global batch cut into such. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vramx.sizes import format_size


@dataclass(frozen=True)
class Attempt:
    """A batch that was tried, and the peak of its steps; None is out of memory."""

    batch: int
    peak_bytes: int | None


@dataclass(frozen=True)
class BatchFit:
    """The largest batch, and how it was found; text by str().

    Attributes:
        batch, peak_bytes: of one process; the peak of two steps with it, as torch counts it.
        budget_bytes: what a peak had to stay within.
        attempts: what was tried, in order.
        evaluation_batch: the largest for `evaluate`; None without one.
        micro_batch, accumulation: for a global batch, where one was asked for: so many steps of
            forward and backward with so many rows a process before each step of the optimizer.
    """

    batch: int
    peak_bytes: int
    budget_bytes: int
    attempts: tuple[Attempt, ...]
    evaluation_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None

    def __str__(self) -> str:
        text = (
            f"batch {self.batch}: peak {format_size(self.peak_bytes)} of "
            f"{format_size(self.budget_bytes)}, in {len(self.attempts)} trials"
        )
        if self.evaluation_batch is not None:
            text += f"; evaluation {self.evaluation_batch}"
        if self.micro_batch is not None:
            text += f"; {self.accumulation} x {self.micro_batch} for the global batch"
        return text


def cut_evenly(global_batch: int | None, batch: int, ranks: int) -> tuple[int | None, int | None]:
    """Return micro-batch and accumulation of a global batch, as even as they can be."""
    if global_batch is None:
        return None, None
    rows = -(-global_batch // ranks)
    accumulation = -(-rows // batch)
    return -(-rows // accumulation), accumulation
