"""fit_batch(): the largest batch that a whole step of training has memory for, in few trials.

search.py says which batch is tried, states_kept.py puts the training back as it was, and ranks.py
has processes agree. Here a trial is run so that nothing of it is left: an error is dropped with its
traceback, and the frames and tensors that hang on it, before caches are given back. Not
thread-safe; takes two steps a trial, and at most log2(largest) + 3 trials.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vramx.errors import InvalidValueError, VramxError, refused
from vramx.planning.device_memory import Memory, cuda_memory, is_out_of_memory
from vramx.planning.program import check_has_memory, check_ran, check_step, found_in
from vramx.planning.ranks import FailedTogetherError, Ranks
from vramx.planning.search import Search
from vramx.planning.states_kept import KeptState
from vramx.sizes import format_size, parse_size

MARGIN = 0.1
TIMEOUT_S = 600.0
_STEPS = 2  # a trial: an optimizer's states are there from the second on


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


def fit_batch(
    step: Callable[[int], Any],
    *,
    start: int = 1,
    max: int | None = None,
    margin: float = MARGIN,
    budget: int | str | None = None,
    evaluate: Callable[[int], Any] | None = None,
    global_batch: int | None = None,
    state: Any = None,
    device: Any = None,
    timeout_s: float = TIMEOUT_S,
    memory: Memory | None = None,
) -> BatchFit:
    """Find the largest batch that a whole step of training has memory for.

    Each trial takes two steps, so that an optimizer's states are there in the second. Sizes are
    chosen by the peaks of smaller ones, in proportion to what a step takes above the model, which
    never runs out of memory where memory grows by a line; so trials are few, and out of memory is
    the exception. Afterwards weights, buffers, gradients, optimizers, schedulers, scalers,
    attributes of modules, generators, and tensors on the weights' device that the step refers to,
    as averages are, have the bits that they had; a tensor that takes more than the weights, as a
    dataset, and lists and numbers of the program have what the trials have put there. Where
    torch.distributed is initialised, all processes call it together, also under DDP and FSDP2, and
    get the same answer.

    Args:
        step: called with a batch size (or a number of tokens, or whatever grows): a whole step of
            training with the longest batch there is of that size: forward, backward, optimizer.
        start: the size that is tried first.
        max: the largest that is tried; it may be the answer.
        margin: the share of the memory that is left free: caches that are cut in pieces take it,
            as do lengths that vary. With vramx's allocator 0.02 is enough.
        budget: bytes or text such as "24GiB" to stay within; by default all that the process may
            have.
        evaluate: called with a batch size, for evaluation: it has an answer of its own, and out of
            memory in it does not make the training's smaller. Without grad mode, beside optimizer
            states.
        global_batch: rows of one optimizer step over all processes, to be cut into micro-batches.
        state: models, optimizers and others with a state_dict(), to be put back as they were; by
            default those that `step` and `evaluate` refer to. () puts nothing back but generators.
        device: a CUDA device; by default the current one.
        timeout_s: how long a process waits for the others.
        memory: what is asked for peaks and limits, instead of torch's allocator.

    Returns:
        A BatchFit.

    Raises:
        InvalidValueError: a value is not accepted; not even a batch of one fits; or no model is
            found that a trial would change.
        VramxError: a batch that fitted does not any more, as where another program took memory; or
            a process ran out of memory where others were waiting for it within a step, whose
            process group is then at an end.

    Memory: a copy of the state on the host.
    Sync: waits for the device at the end of each trial.

    Example:
        >>> def step(batch):                                               # doctest: +SKIP
        ...     loss = model(tokens(batch, longest)).mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> print(vramx.fit_batch(step, max=512, global_batch=1024))       # doctest: +SKIP
        batch 88: peak 21.10 GiB of 21.34 GiB, in 4 trials; 12 x 86 for the global batch
    """
    _check(step, evaluate, margin)
    for name, value in (("start", start), ("max", max), ("global_batch", global_batch)):
        _check_size(name, value)
    if max is not None and start > max:
        raise InvalidValueError(f"start {start} is above max {max}")
    memory = cuda_memory(device) if memory is None else memory
    found = found_in(*((step, evaluate) if state is None else (state,)))
    if state is None and not (found.models or found.optimizers):
        raise InvalidValueError(
            "step refers to no model and no optimizer that a trial could be put back from; give "
            "state=(model, optimizer), or state=() if it changes nothing"
        )
    check_has_memory(found.models)
    # Not before all that can be refused is: the processes wait for each other here.
    fitting = _Fitting(memory, KeptState(found), Ranks(timeout_s), budget, margin)
    with contextlib.closing(fitting):
        return fitting.run(step, evaluate, (start, max), global_batch)


def _check(step: Any, evaluate: Any, margin: float) -> None:
    check_step(step)
    if evaluate is not None:
        check_step(evaluate)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < 1:
        raise refused("margin", margin, "is a share from 0.0 to below 1.0")


def _check_size(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise refused(name, value, "is 1 or more")


class _Fitting:
    """One call of fit_batch."""

    def __init__(
        self, memory: Memory, kept: KeptState, ranks: Ranks, budget: Any, margin: float
    ) -> None:
        self._memory = memory
        self._kept = kept
        self._ranks = ranks
        self._attempts: list[Attempt] = []
        self._clean()
        self._states_bytes = 0  # and of gradients, which are there in evaluation
        self._left_bytes: list[int] = []  # by trials that had memory
        self._base = memory.allocated_bytes()
        limit = memory.limit_bytes() if budget is None else parse_size(budget)
        self.budget_bytes = int(limit * (1 - margin))

    def close(self) -> None:
        self._kept.close()
        self._clean()
        self._ranks.close()

    def run(
        self,
        step: Callable[[int], Any],
        evaluate: Callable[[int], Any] | None,
        sizes: tuple[int, int | None],
        global_batch: int | None,
    ) -> BatchFit:
        batch = self._largest(step, sizes, "a step")
        peaks = {each.batch: each.peak_bytes for each in self._attempts}
        attempts = tuple(self._attempts)
        evaluated = None
        if evaluate is not None:
            self._states_bytes = min(self._left_bytes)
            evaluated = self._largest(_without_grad(evaluate), sizes, "evaluation")
        micro, accumulation = _cut_evenly(global_batch, batch, self._ranks.count)
        return BatchFit(
            batch=batch,
            peak_bytes=peaks[batch] or 0,
            budget_bytes=self.budget_bytes,
            attempts=attempts,
            evaluation_batch=evaluated,
            micro_batch=micro,
            accumulation=accumulation,
        )

    def _largest(self, step: Callable[[int], Any], sizes: tuple[int, int | None], what: str) -> int:
        start, most = sizes
        short = self._base + self._states_bytes - self.budget_bytes
        room = -max(self._ranks.gathered(short))  # of the process that has least
        search = Search(int(room), start, most)
        while (batch := search.next()) is not None:
            above = self._tried(step, batch, what)
            if above is None and search.foretells(batch):
                # It must fit, so that something else may have been there for a moment.
                above = self._tried(step, batch, what)
            search.note(batch, above)
        if search.best is None:
            raise InvalidValueError(
                f"{what} with a batch of {search.too_large} does not fit in "
                f"{format_size(max(0.0, room))}, which the budget of "
                f"{format_size(self.budget_bytes)} has above what is allocated without any"
            )
        if search.too_large is not None and self._is_gone(step, search, what):
            raise VramxError(
                f"{what} with a batch of {search.best} ran out of memory after it had fitted: "
                "another program or a leak takes memory of the device"
            )
        return search.best

    def _is_gone(self, step: Callable[[int], Any], search: Search, what: str) -> bool:
        """Tell whether what fitted before what ran out of memory does not any more."""
        last = self._attempts[-1]
        if last.peak_bytes is not None:
            return False
        assert search.best is not None
        return self._tried(step, search.best, what) is None

    def _tried(self, step: Callable[[int], Any], batch: int, what: str) -> int | None:
        """Return the peak of a trial above what is there without, over all processes; None: OOM."""
        with self._ranks.attempt(f"in {what} with a batch of {batch}") as attempt:
            peak = _peak_of(step, batch, self._memory)
            if peak is None:
                attempt.fail()
            else:
                gc.collect()
                self._left_bytes.append(self._memory.allocated_bytes() - self._base)
        # The error is gone, and with it the frames that held tensors.
        self._kept.restore()
        self._clean()
        try:
            every = self._ranks.gathered(None if peak is None else max(0, peak - self._base))
        except VramxError as error:
            if peak is not None:
                raise
            raise FailedTogetherError(
                f"out of memory in {what} with a batch of {batch}, which other processes were in "
                "and waited for this one: start again, with a smaller max"
            ) from error
        known = [above for above in every if above is not None]
        has_failed = len(known) < len(every)
        self._attempts.append(Attempt(batch, None if has_failed else peak))
        return None if has_failed else max(known)

    def _clean(self) -> None:
        gc.collect()
        self._memory.settle()
        self._memory.release()


def _peak_of(step: Callable[[int], Any], batch: int, memory: Memory) -> int | None:
    """Return the peak of a trial's steps; None: out of memory. Other errors are the caller's."""
    memory.reset_peak()
    try:
        for _ in range(_STEPS):
            check_ran(step(batch))
        memory.settle()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return memory.peak_bytes()


def _without_grad(evaluate: Callable[[int], Any]) -> Callable[[int], Any]:
    def run(batch: int) -> Any:
        with torch.no_grad():
            return evaluate(batch)

    return run


def _cut_evenly(global_batch: int | None, batch: int, ranks: int) -> tuple[int | None, int | None]:
    """Return micro-batch and accumulation of a global batch, as even as they can be."""
    if global_batch is None:
        return None, None
    rows = -(-global_batch // ranks)
    accumulation = -(-rows // batch)
    return -(-rows // accumulation), accumulation
