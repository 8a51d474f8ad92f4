"""What is known of a model that is planned, and the choice of words for a budget.

The noisiest word is measured and chosen from only where the caller asked for it, or where nothing
else fits; that is said. Not responsible for measuring (bench.py) nor for the search (choice.py).
Not thread-safe; a choice runs some steps, and the first one measures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from vramx.errors import InvalidValueError
from vramx.planning.agreement import Agreement, agreeing
from vramx.planning.bench import Bench, ready
from vramx.planning.blocks import Block, find_blocks
from vramx.planning.budget import SMALLEST, Budget, budget_bytes_of, device_of
from vramx.planning.caches import Caches
from vramx.planning.loop import Added
from vramx.planning.measured import Measured, Run
from vramx.planning.waiting import Waiting
from vramx.planning.words import EVERY, NOISY, chosen_words, words_for
from vramx.sizes import format_size


@dataclass(frozen=True)
class Choice:
    """A run of what was chosen for a budget, and what there is to say of it, a line each."""

    measured: Measured
    run: Run
    budget_bytes: int | None
    added: Added
    notes: tuple[str, ...]


class Chooser:
    """A model in its loop, and what was measured of it.

    Args:
        levels: the words to choose among, as plan() takes them.
        notes: what there is to say of any choice.
    """

    def __init__(
        self,
        model: nn.Module,
        levels: str | Collection[str] | None,
        added: Added,
        notes: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.added = added
        self._device = device_of(model)
        self._notes = tuple(notes)
        self._is_free = levels is None  # to take the noisiest word where it must be
        self._chosen = chosen_words(levels)
        self._blocks = find_blocks(model)
        self._measured: dict[bool, Measured] = {}
        if Caches(model):
            self._notes += ("caches of keys and values are off while the plan is applied",)
        self._words(self._chosen)

    def _words(self, chosen: Collection[str]) -> dict[Block, list[str]]:
        return {block: words_for(block, self._device, chosen) for block in self._blocks}

    @contextlib.contextmanager
    def ready(self, sample: object, agreement: Agreement) -> Iterator[Bench]:
        """Have the model ready to be measured; put all back on leaving."""
        with contextlib.ExitStack() as stack:
            with agreement.phase("measuring the optimizer"):
                bench = stack.enter_context(ready(self.model, sample, self.added.loop, agreement))
            self.added = replace(
                self.added,
                reserved_bytes=int(agreement.most(self.added.reserved_bytes)),
                states_bytes=int(agreement.most(bench.loop.states_bytes)),
                slots_bytes=int(agreement.most(bench.loop.slots_bytes)),
                waiting=Waiting(
                    int(agreement.most(bench.loop.waiting.nbytes)),
                    agreement.most(bench.loop.waiting.ms_per_byte),
                    bench.loop.waiting.hidden,
                ),
            )
            yield bench

    def choose(self, sample: object, budget: Budget) -> Choice:
        """Return the choice for a budget; what was run before is not run again.

        Raises:
            InvalidValueError: nothing fits, or the model cannot be planned.
        """
        with agreeing(self.model) as agreement:
            return self.choose_together(sample, budget, agreement)

    def choose_together(self, sample: object, budget: Budget, agreement: Agreement) -> Choice:
        with agreement.phase("reading the budget"):
            budget_bytes = budget_bytes_of(budget, self._device)
        agreement.check_alike(
            "their budgets or blocks",
            (budget == SMALLEST, budget_bytes is None, self._is_free, self._chosen),
            [(block.name, block.known, block.has_mlp) for block in self._blocks],
        )
        if budget_bytes is not None:
            budget_bytes = -int(agreement.most(-budget_bytes))
        with self.ready(sample, agreement) as bench:
            if budget == SMALLEST:
                return self._smallest(bench)
            return self._fitting(bench, budget_bytes)

    def _smallest(self, bench: Bench) -> Choice:
        measured = self._known(bench, with_noisy=False)
        run = bench.smallest(measured)
        if run.measured_bytes is None:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. A step of {type(self.model).__name__} is too much for the "
                "device however little it keeps"
            )
        return self._choice(measured, run, None)

    def _fitting(self, bench: Bench, budget_bytes: int | None) -> Choice:
        """Return the fastest choice within a budget, the noisiest word last of all."""
        smallest = list[int]()
        for with_noisy in (False, True) if self._is_free else (False,):
            measured = self._known(bench, with_noisy=with_noisy)
            limit = float("inf")
            if budget_bytes is not None:
                limit = self.added.below(measured.spread, budget_bytes)
            run = bench.fitting(measured, self.added.waiting.limit_beside(measured.timeline, limit))
            if run.measured_bytes is not None and run.measured_bytes <= limit:
                room = 0 if budget_bytes is None else int(limit) - run.measured_bytes
                kept_bytes = min(self.added.waiting.nbytes, room)
                return self._choice(measured, run, budget_bytes, kept_bytes)
            peak = run.measured_bytes or run.predicted_bytes
            smallest.append(self.added.above(measured.spread, peak))
        budget = "none" if budget_bytes is None else format_size(budget_bytes)
        raise InvalidValueError(
            f"the smallest budget that a step of this model can stay within is "
            f"{format_size(min(smallest))} ({min(smallest)} bytes); the budget is "
            f"{budget}{self.added}"
        )

    def _known(self, bench: Bench, *, with_noisy: bool) -> Measured:
        found = self._measured.get(with_noisy)
        if found is None:
            words = self._words(chosen_words(EVERY) if with_noisy else self._chosen)
            before = next((each.before for each in self._measured.values()), None)
            found = self._measured[with_noisy] = bench.measure(words, before)
        return found

    def _choice(
        self, measured: Measured, run: Run, budget_bytes: int | None, kept_bytes: int = 0
    ) -> Choice:
        notes = [*self._notes, *measured.dropped]
        count = list(measured.words(run.arrangement).values()).count(NOISY)
        if count:
            why = "nothing else fits the budget" if self._is_free else "levels allow it"
            notes.append(f"{NOISY} is for {count} blocks, as {why}; its gradients are the noisiest")
        added = replace(self.added, kept_bytes=kept_bytes)
        return Choice(measured, run, budget_bytes, added, tuple(notes))
