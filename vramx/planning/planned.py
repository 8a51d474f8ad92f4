"""Plan: what was chosen for a model, and applying it.

What it says is laid out by plan_text.py. Not thread-safe; applying costs milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vramx.errors import InvalidValueError
from vramx.planning.agreement import agreeing
from vramx.planning.budget import Budget
from vramx.planning.caches import Caches
from vramx.planning.choice import smallest
from vramx.planning.chooser import Choice, Chooser
from vramx.planning.plan_text import Sheet, code_lines, html_of, text_of
from vramx.planning.search import largest_on, line_of
from vramx.planning.steps import first_of, sample_size
from vramx.planning.words import Applied, apply_words
from vramx.sizes import format_size


@dataclass(frozen=True)
class PlanRow:
    """What is done with one block: its name, its class, the word, what it keeps, its times.

    A step takes as long as the blocks keep the busier of host and device busy, and what is outside
    of them; without a GPU there is the host alone.
    """

    name: str
    module: str
    word: str
    kept_bytes: int
    host_ms: float
    device_ms: float


class Plan:
    """What plan() chose for a model: a word for each block; text by str(), a table in a notebook.

    apply() makes it and undo() takes that back; vramx.restore(model) undoes all else as well. Of
    states that wait on the host as many stay on the device as the budget has room for. Bytes
    are peaks of a step in its loop, with the optimizer's states and what was reserved, which are
    `added_bytes`; `predicted_bytes` was predicted before the chosen arrangement was run,
    `measured_bytes` is what the run had, and `before_bytes` what a step of the model as it was
    takes. Where processes train together, all of these are the largest of any. A plan holds the
    model and the optimizer, and neither the sample nor any activation.

    Attributes:
        budget_bytes: None where there is none.
        notes: what there is to know of the choice, a line each: levels that were left out and why,
            the noisiest level where it was taken, what was not counted.

    Example:
        >>> import torch, vramx
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
        >>> plan = vramx.plan(torch.nn.Sequential(layer), torch.ones(4, 2, 16))
        >>> list(plan.words), plan.measured_bytes <= 2 * plan.predicted_bytes
        (['0'], True)
    """

    def __init__(self, chooser: Chooser, choice: Choice) -> None:
        self._chooser = chooser
        self._measured = choice.measured
        self._run = choice.run
        self._added = choice.added
        self._applied: Applied | None = None
        self._keep_bytes = choice.added.loop.keep_bytes  # of states, without the plan
        self._caches = Caches(chooser.model)
        self.budget_bytes = choice.budget_bytes
        self.notes = choice.notes

    @property
    def added_bytes(self) -> int:
        """Bytes of what was not there: states that an optimizer will have, and what is reserved."""
        return self._added.nbytes

    @property
    def words(self) -> dict[str, str]:
        """The word of each block, by the block's name."""
        return {b.name: word for b, word in self._measured.words(self._run.arrangement).items()}

    @property
    def predicted_bytes(self) -> int:
        """The peak that was predicted."""
        return self._run.predicted_bytes + self.added_bytes

    @property
    def predicted_ms(self) -> float:
        """The time of a step that was predicted."""
        return self._run.arrangement.step_ms

    @property
    def measured_bytes(self) -> int:
        """The peak of a step that was run as planned."""
        assert self._run.measured_bytes is not None
        return self._run.measured_bytes + self.added_bytes

    @property
    def measured_ms(self) -> float:
        """The time of a step that was run as planned."""
        return self._run.measured_ms

    @property
    def before_bytes(self) -> int | None:
        """The peak of a step without the plan; None: it was not run, or ran out of memory."""
        peak = self._measured.before.peak_bytes
        return None if peak is None else peak + self.added_bytes

    @property
    def needed_bytes(self) -> int:
        """The smallest budget that this plan stays within.

        On a GPU 2 MiB and 0.25 % more than was measured: what torch's allocator has cached moves a
        peak.
        """
        return self._added.above(self._measured.spread, self.measured_bytes - self.added_bytes)

    @property
    def smallest_bytes(self) -> int:
        """The smallest peak that an arrangement is predicted to have."""
        return smallest(self._measured.timeline).peak_bytes + self.added_bytes

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """A row for each block that the step calls, in the order of the first calls."""
        found: dict[int, PlanRow] = {}
        holds = False
        calls = zip(self._measured.timeline.places, self._run.arrangement.words, strict=True)
        for place, word in calls:
            block, cost = self._measured.blocks[place.block], place.costs[word]
            row = PlanRow(block.name, type(block.module).__name__, word, 0, 0.0, 0.0)
            row = found.get(place.block, row)
            found[place.block] = replace(
                row,
                kept_bytes=row.kept_bytes + place.kept(word, holds),
                host_ms=row.host_ms + cost.host_ms,
                device_ms=row.device_ms + cost.device_ms,
            )
            holds = cost.holds_output
        return tuple(found.values())

    @property
    def code(self) -> str:
        """The lines of a program that do what apply() does, for a model called `model`."""
        words = self._measured.words(self._run.arrangement)
        lines = [*code_lines(self._chooser.model, words, self._caches)]
        if self._added.kept_bytes:
            keep = self._keep_bytes + self._added.kept_bytes
            lines.append(f"vramx.offload_optimizer(optimizer, keep={keep})")
        return "\n".join(lines)

    def __str__(self) -> str:
        return text_of(self._sheet())

    def _repr_html_(self) -> str:
        return html_of(self._sheet())

    def _sheet(self) -> Sheet:
        head = ("block", "class", "word", "kept", "host ms", "device ms")
        rows = [
            (
                row.name,
                row.module,
                row.word,
                format_size(row.kept_bytes),
                f"{row.host_ms:.2f}",
                f"{row.device_ms:.2f}",
            )
            for row in self.rows
        ]
        budget = "none" if self.budget_bytes is None else format_size(self.budget_bytes)
        before = self._measured.before
        lines = [
            f"peak {format_size(self.predicted_bytes)} predicted, "
            f"{format_size(self.measured_bytes)} measured; {self._peak_before()}; budget {budget}, "
            f"smallest {format_size(self.smallest_bytes)}{self._added}",
            f"step {self.predicted_ms:.1f} ms predicted, {self.measured_ms:.1f} measured"
            + ("" if before.peak_bytes is None else f"; before {before.step_ms:.1f}"),
        ]
        return Sheet(head, rows, [*lines, *self.notes], ["plan.apply()  # or:", self.code])

    def _peak_before(self) -> str:
        if self.before_bytes is not None:
            return f"before {format_size(self.before_bytes)}"
        return f"before: {self._measured.before.reason}"

    def apply(self) -> Plan:
        """Do with each block what its word says; return the plan.

        Raises:
            InvalidValueError: it is applied already, or a block was changed since.
        """
        if self._is_applied():
            raise InvalidValueError("the plan is applied already")
        measured = self._measured
        self._applied = apply_words(measured.model, measured.words(self._run.arrangement))
        self._caches.turn_off()
        self._added.loop.keep_states(self._keep_bytes + self._added.kept_bytes)
        return self

    def undo(self) -> None:
        """Undo what apply() did, and no more; where the plan is not applied, do nothing."""
        if self._applied is not None:
            self._applied.undo()
            self._caches.turn_on()
            self._added.loop.keep_states(self._keep_bytes)
            self._applied = None

    def with_budget(self, sample: Any, budget: Budget) -> Plan:
        """Return a plan for another budget from the same measurements; only the choice is run.

        Args:
            sample: as plan() was given it.

        Raises:
            InvalidValueError: as of plan(); or this plan is applied.
        """
        self._check_not_applied()
        return Plan(self._chooser, self._chooser.choose(sample, budget))

    def fit_batch(self, sample: Any) -> int:
        """Return how many rows a sample may have for a step to fit the budget with these words.

        As vramx.fit_batch() finds for a step of your own, here of the plan and without a trial.

        A step's peak is taken to be linear in the rows; it is measured with the sample and with
        half of it. States that stay on the device have what the sample leaves, and count. Another
        budget's plan may fit more: a plan for the smallest peak fits most.

        Args:
            sample: a tensor, a tuple or a mapping, of at least two rows.

        Raises:
            InvalidValueError: the plan has no budget, it is applied, or the sample has one row.
        """
        self._check_not_applied()
        rows = sample_size(sample)
        if self.budget_bytes is None or rows < 2:
            raise InvalidValueError(
                f"a largest batch needs a plan with a budget and a sample of two rows or more; "
                f"the budget is {self.budget_bytes}, the rows are {rows}"
            )
        peaks = {n: self._peak_bytes(first_of(sample, n), n) for n in (rows, rows // 2)}
        above = partial(self._added.above, self._measured.spread)
        line = line_of([(n, above(peaks[n])) for n in (rows // 2, rows)])
        return largest_on(line, self.budget_bytes, rows)

    def _peak_bytes(self, sample: Any, rows: int) -> int:
        words = self._measured.words(self._run.arrangement)
        with (
            agreeing(self._chooser.model) as agreement,
            self._chooser.ready(sample, agreement) as bench,
        ):
            agreement.check_alike("the rows of their samples", rows)
            return bench.peak_bytes(words)

    def _check_not_applied(self) -> None:
        if self._is_applied():
            raise InvalidValueError("the plan is applied; call its undo() first")

    def _is_applied(self) -> bool:
        return self._applied is not None and self._applied.is_there()
