"""plan(): measure a model once, choose what each block keeps so that a step fits a budget, verify.

Here is what a user sees: the budget, the plan, its text. bench.py measures and searches. Not
thread-safe; takes seconds to a minute, most of it the compilation of kernels that were not used
before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vramx.errors import InvalidValueError, brief
from vramx.planning.bench import Bench, Measured, Run, ready
from vramx.planning.blocks import find_blocks
from vramx.planning.budget import SMALLEST, Budget, budget_bytes_of, device_of
from vramx.planning.choice import smallest
from vramx.planning.loop import FRESH, Added, Loop
from vramx.planning.steps import check_sample, first_of, sample_size
from vramx.planning.words import Applied, apply_words, words_for
from vramx.sizes import format_size, parse_size


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
    """What plan() chose for a model: a word for each block; text by str().

    apply() makes it and undo() takes that back; vramx.restore(model) undoes all else as well. Bytes
    are peaks of a step in its loop, with the optimizer's states and what was reserved, which are
    `added_bytes`; `predicted_bytes` was predicted before the chosen arrangement was run,
    `measured_bytes` is what the run had. A plan holds the model and the optimizer, and neither the
    sample nor any activation.

    Example:
        >>> import torch, vramx
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
        >>> plan = vramx.plan(torch.nn.Sequential(layer), torch.ones(4, 2, 16))
        >>> list(plan.words), plan.measured_bytes <= 2 * plan.predicted_bytes
        (['0'], True)
    """

    def __init__(
        self, measured: Measured, run: Run, budget_bytes: int | None, added: Added
    ) -> None:
        self._measured = measured
        self._run = run
        self._added = added
        self._applied: Applied | None = None
        self.budget_bytes = budget_bytes

    @property
    def added_bytes(self) -> int:
        """Bytes of what did not exist yet: the optimizer's states, and what was reserved."""
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
    def needed_bytes(self) -> int:
        """The smallest budget that this plan stays within.

        On a GPU 2 MiB and 0.25 % more than was measured: what torch's allocator has cached moves a
        peak.
        """
        return (
            self._measured.spread.above(self.measured_bytes - self.added_bytes) + self.added_bytes
        )

    @property
    def measured_ms(self) -> float:
        """The time of a step that was run as planned."""
        return self._run.measured_ms

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

    def __str__(self) -> str:
        lines = [("block", "class", "word", "kept", "host ms", "device ms")]
        lines += [
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
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        budget = "none" if self.budget_bytes is None else format_size(self.budget_bytes)
        text.append(
            f"peak {format_size(self.predicted_bytes)} predicted, "
            f"{format_size(self.measured_bytes)} measured; budget {budget}, "
            f"smallest {format_size(self.smallest_bytes)}{self._added}"
        )
        text.append(f"step {self.predicted_ms:.1f} ms predicted, {self.measured_ms:.1f} measured")
        return "\n".join(text)

    def apply(self) -> Plan:
        """Do with each block what its word says; return the plan.

        Raises:
            InvalidValueError: it is applied already, or a block was changed since.
        """
        if self._is_applied():
            raise InvalidValueError("the plan is applied already")
        measured = self._measured
        self._applied = apply_words(measured.model, measured.words(self._run.arrangement))
        return self

    def undo(self) -> None:
        """Undo what apply() did, and no more; where the plan is not applied, do nothing."""
        if self._applied is not None:
            self._applied.undo()

    def with_budget(self, sample: Any, budget: Budget) -> Plan:
        """Return a plan for another budget from the same measurements; only the choice is run.

        Args:
            sample: as plan() was given it.

        Raises:
            InvalidValueError: as of plan(); or this plan is applied.
        """
        self._check_not_applied()
        with ready(self._measured.model, sample, self._added.loop) as bench:
            return _choose(self._measured, bench, budget, self._added)

    def largest_batch(self, sample: Any) -> int:
        """Return how many rows a sample may have for a step to fit the budget with these words.

        A step's peak is taken to be linear in the rows; it is measured with the sample and with
        half of it. Another budget's plan may fit more: a plan for the smallest peak fits most.

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
        peaks = {n: self._peak_bytes(first_of(sample, n)) for n in (rows, rows // 2)}
        slope = (peaks[rows] - peaks[rows // 2]) / (rows - rows // 2)
        room = self.budget_bytes - self.added_bytes - self._measured.spread.above(peaks[rows])
        return max(0, rows + int(room // max(slope, 1.0)))

    def _peak_bytes(self, sample: Any) -> int:
        with ready(self._measured.model, sample, self._added.loop) as bench:
            return bench.peak_bytes(self._measured.words(self._run.arrangement))

    def _check_not_applied(self) -> None:
        if self._is_applied():
            raise InvalidValueError("the plan is applied; call its undo() first")

    def _is_applied(self) -> bool:
        return self._applied is not None and self._applied.is_there()


def plan(
    model: nn.Module,
    sample: Any,
    budget: Budget = None,
    *,
    levels: Collection[str] | None = None,
    reserve: int | str = 0,
    optimizer: Any = None,
    gradients: str = FRESH,
) -> Plan:
    """Choose what each repeated block of a model keeps, for the fastest step that fits a budget.

    Works on any model with repeated blocks. Those that vramx.optimize knows can have each of its
    levels; others can be left, have what they save packed ("int8", "int4") or be recomputed from
    their input ("recompute_all"), packed where what they do is smooth. On a GPU, either can be
    moved to the host ("int8_offload", "recompute_all_offload"). The loss of a language model makes
    no logits under any of them, as vramx.optimize has it. The model is as before when this
    returns; apply() changes it. Plan before DDP, FSDP or torch.compile wrap the model.

    Args:
        model: on the device where it is to be trained. It is measured in training mode.
        sample: a batch as large as those of the training: a tensor, a tuple of arguments, a mapping
            of keyword arguments, or a function of the model that returns the loss. Of a result that
            is no loss, the loss is the mean of its logits or of its first tensor.
        budget: the most that a step may have allocated: bytes, or text such as "24GiB", or the
            fraction of the GPU's memory as a float; None is the fastest step, and "smallest" the
            one of the smallest peak.
        levels: the words to choose among; None is all. "int4" has the noisiest gradients.
        reserve: bytes to leave free of the budget for what vramx cannot know of.
        optimizer: the torch.optim.Optimizer of the training, or several of them. The bytes of
            states that do not exist yet are added, and the peak of its own step counts. Both are
            measured, by steps of copies of it for copies of one parameter of each shape. Of states
            that wait on the host (offload_optimizer) what is on its way counts.
        gradients: "fresh": they are set to None before each step, as zero_grad() does;
            "accumulated": they are there during the whole step, as with accumulation over steps, or
            zero_grad(set_to_none=False); "stepped": a step in backward uses each as it comes, and
            no two of them are there. Plan before the hooks for that are registered, but for those
            of offload_optimizer(in_backward=True), which say "stepped" of themselves.

    Returns:
        A Plan, whose step was run and stayed within the budget; on a GPU with 2 MiB and 0.25 % to
        spare, which what torch's allocator has cached may take.

    Raises:
        InvalidValueError: a value is not accepted; no arrangement fits the budget (the text names
            the smallest budget); the model has no repeated blocks or cannot be planned as it is; a
            block is not the same when it is recomputed.
        torch.OutOfMemoryError: a step is too much for the device however little it keeps.

    Memory: at most a step that keeps least, or one block more than nothing; then the chosen step.
    Sync: waits for the device.
    Error bound: the peak is of steps that were run, forward and backward; the optimizer's step is
        taken for a parameter at a time, or for all at once where two at once take twice as much.

    Example:
        >>> import torch, vramx
        >>> blocks = (torch.nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
        >>> plan = vramx.plan(torch.nn.Sequential(*blocks), torch.ones(4, 2, 16), "1MiB")
        >>> plan.measured_bytes <= plan.budget_bytes
        True
    """
    if not isinstance(model, nn.Module):
        raise InvalidValueError(
            f"model {brief(model)} is not accepted; accepted is a torch.nn.Module"
        )
    if hasattr(model, "_orig_mod"):
        raise InvalidValueError(
            "model is compiled already, so that its blocks are not called; plan the model that "
            "torch.compile() was given, and compile afterwards"
        )
    device = device_of(model)
    budget_bytes_of(budget, device)  # a mistake is raised before anything is measured
    added = Added(Loop(optimizer, gradients), parse_size(reserve))
    check_sample(sample)
    words = {block: words_for(block, device, levels) for block in find_blocks(model)}
    with ready(model, sample, added.loop) as bench:
        added = replace(added, states_bytes=bench.states_bytes, slots_bytes=bench.slots_bytes)
        return _choose(bench.measure(words), bench, budget, added)


def _choose(measured: Measured, bench: Bench, budget: Budget, added: Added) -> Plan:
    """Return the plan for a budget; what was run before is not run again.

    Raises:
        InvalidValueError: nothing fits.
    """
    if budget == SMALLEST:
        return Plan(measured, bench.smallest(measured), None, added)
    budget_bytes = budget_bytes_of(budget, device_of(measured.model))
    room = float("inf") if budget_bytes is None else budget_bytes - added.nbytes
    limit = room if budget_bytes is None else measured.spread.below(budget_bytes - added.nbytes)
    best = bench.fastest(measured, limit)
    if best is None:
        best = bench.smallest(measured)
        if best.measured_bytes is None or best.measured_bytes > limit:
            peak = best.measured_bytes or best.predicted_bytes
            needed = measured.spread.above(peak) + added.nbytes
            raise InvalidValueError(
                f"the smallest budget that a step of this model can stay within is "
                f"{format_size(needed)} ({needed} bytes); the budget is "
                f"{format_size(room + added.nbytes)}{added}"
            )
    return Plan(measured, best, budget_bytes, added)
