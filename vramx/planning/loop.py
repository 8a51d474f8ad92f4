"""What a training loop has beside forward and backward: its gradients, and its optimizer.

    fresh         zero_grad(set_to_none=True) before each step: gradients come as activations go
    accumulated   gradients are there during the whole step, as with accumulation over steps
    late          set to None between forward and backward, as Lightning does: there while
                  activations grow
    stepped       each gradient is used by a step in backward, and gone before the next one comes

The optimizer's own step is never taken: what it costs is measured on copies (states.py). Not
thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vramx.errors import InvalidValueError, refused
from vramx.optimizers.copies import unknown_wrapper, unwrapped
from vramx.optimizers.rounds import Rounds
from vramx.planning.lightning_step import is_lightning, optimizers_of
from vramx.planning.meters import Meter, Spread
from vramx.planning.states import OptimizerCost, cost_of, rounds_of
from vramx.planning.waiting import HIDDEN_BY_BACKWARD, NONE, Waiting, ms_per_byte
from vramx.sizes import format_size

FRESH, ACCUMULATED, LATE, STEPPED = GRADIENTS = ("fresh", "accumulated", "late", "stepped")


class Loop:
    """What the caller said of a loop.

    Raises:
        InvalidValueError: a value is not accepted.
    """

    def __init__(self, optimizer: Any, gradients: str) -> None:
        if gradients not in GRADIENTS:
            raise refused("gradients", gradients, GRADIENTS)
        several = () if optimizer is None else optimizer
        self.optimizers = [unwrapped(x) for x in ([optimizer] if _is_one(optimizer) else several)]
        for each in self.optimizers:
            if not isinstance(each, Optimizer):
                raise refused("optimizer", each, "are a torch.optim.Optimizer and several of them")
        self.gradients = gradients
        if any(rounds.options.in_backward for rounds in self._rounds().values()):
            if gradients == ACCUMULATED:
                raise InvalidValueError(
                    "gradients 'accumulated' is not accepted of an optimizer that steps in backward"
                )
            self.gradients = STEPPED

    def _rounds(self) -> dict[Optimizer, Rounds]:
        """Return what steps those whose states wait on the host."""
        found = ((each, rounds_of(each)) for each in self.optimizers)
        return {each: rounds for each, rounds in found if rounds is not None}

    def _buckets(self) -> list[list[torch.Tensor]]:
        """Return the parameters that are stepped together in backward."""
        every = self._rounds().values()
        return [bucket for own in every if own.options.in_backward for bucket in own.buckets()]

    @contextlib.contextmanager
    def without_steps(self) -> Iterator[None]:
        """Have gradients come without a step in backward, where vramx takes these."""
        with contextlib.ExitStack() as stack:
            for optimizer, rounds in self._rounds().items():
                stack.enter_context(rounds.without_steps(optimizer))
            yield

    @property
    def keep_bytes(self) -> int:
        """What stays on the device of states that wait on the host, of the first optimizer."""
        return next((own.options.keep_bytes for own in self._rounds().values()), 0)

    def keep_states(self, nbytes: int) -> None:
        """Have so many bytes of them stay."""
        for optimizer, own in [*self._rounds().items()][:1]:
            if own.options.keep_bytes != nbytes:
                own.keep(optimizer, nbytes)

    def prepare(self, trained: Iterable[nn.Parameter]) -> None:
        """Have the gradients that are there before a step."""
        for parameter in trained:
            if self.gradients != ACCUMULATED:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def begin_step(self, trained: Iterable[nn.Parameter]) -> None:
        """Do with gradients what is done before a step, when all others are over."""
        if self.gradients in (FRESH, STEPPED):  # of those who are stepped, what no step has taken
            self.prepare(trained)
        elif self.gradients == LATE:
            for parameter in trained:  # as a step before it has left them; nothing reads them
                parameter.grad = None
                parameter.grad = torch.empty_like(parameter)

    def before_backward(self, trained: Iterable[nn.Parameter]) -> None:
        """Do with gradients what is done between forward and backward."""
        if self.gradients == LATE:
            self.prepare(trained)

    @contextlib.contextmanager
    def measured(
        self, trained: Sequence[nn.Parameter], meter: Meter, device: torch.device
    ) -> Iterator[Measured]:
        """Measure the optimizers; within the context, gradients go as they do in the loop."""
        costs = [cost_of(each, meter) for each in self.optimizers]
        handles = []
        if self.gradients == STEPPED:
            temporary = {key: n for cost in costs for key, n in cost.temporary_bytes.items()}
            together = {id(p): bucket for bucket in self._buckets() for p in bucket}
            for parameter in trained:
                bucket = together.get(id(parameter), [parameter])
                hook = _Stepped(bucket, temporary.get(id(parameter), 0))
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            yield Measured(self, costs, device)
        finally:
            for handle in handles:
                handle.remove()


def loop_of(model: nn.Module, optimizer: Any, gradients: str | None) -> tuple[Loop, list[str]]:
    """Return the loop that a model is trained in, and what there is to say of it."""
    of_lightning = is_lightning(model)
    why_none = ""
    if optimizer is None and of_lightning:
        optimizer, why_none = optimizers_of(model)
    if gradients is None:
        gradients = LATE if of_lightning else FRESH
    if not why_none and optimizer is None:
        why_none = "no optimizer was given: its states and its step are not counted"
    said = [why_none] if why_none else []
    several = [optimizer] if _is_one(optimizer) else list(() if optimizer is None else optimizer)
    for each in several:
        wrapper = unknown_wrapper(each)
        if wrapper is not None:
            said.append(
                f"{type(wrapper).__name__} is around a {type(unwrapped(each)).__name__}: what it "
                "takes beside that is not counted; reserve is for it"
            )
    return Loop(several, gradients), said


@dataclass(frozen=True)
class Added:
    """The loop of a plan, and the bytes of what does not exist while it is measured."""

    loop: Loop
    reserved_bytes: int
    states_bytes: int = 0
    slots_bytes: int = 0
    waiting: Waiting = NONE
    kept_bytes: int = 0  # of what would wait, as the plan has it

    @property
    def nbytes(self) -> int:
        return self.reserved_bytes + self.states_bytes + self.slots_bytes + self.kept_bytes

    def above(self, spread: Spread, peak_bytes: int) -> int:
        """Return the smallest budget that a step of this measured peak stays within in its loop.

        What is not there yet may take more, too: all but what is reserved.
        """
        there = self.nbytes - self.reserved_bytes
        return spread.above(peak_bytes + there) + self.reserved_bytes

    def below(self, spread: Spread, budget_bytes: int) -> int:
        """Return the highest measured peak of which above() is no more than a budget."""
        return spread.below(budget_bytes - self.reserved_bytes) - (
            self.nbytes - self.reserved_bytes
        )

    def __str__(self) -> str:
        """Say what was added, after the bytes that it was added to."""
        names = " and ".join(dict.fromkeys(type(each).__name__ for each in self.loop.optimizers))
        states = f"{format_size(self.states_bytes)} of states of {names} that do not exist yet"
        parts = [states] if self.states_bytes else []
        if self.slots_bytes:
            parts.append(f"{format_size(self.slots_bytes)} for states on their way from the host")
        if self.kept_bytes:
            parts.append(f"{format_size(self.kept_bytes)} of states that need not wait there")
        if self.reserved_bytes:
            parts.append(f"{format_size(self.reserved_bytes)} reserved")
        return f"; counted are {' and '.join(parts)}" if parts else ""


class Measured:
    """A loop whose optimizers were measured.

    Attributes:
        states_bytes: of states that do not exist yet.
        slots_bytes: what states on their way from the host and back take while backward runs.
        step_bytes: what the optimizers' step takes for a moment, where it is taken after backward.
        waiting: the states that wait on the host between steps.
    """

    def __init__(self, loop: Loop, costs: Sequence[OptimizerCost], device: torch.device) -> None:
        self._loop = loop
        self.states_bytes = sum(cost.states_bytes for cost in costs)
        after = loop.gradients != STEPPED
        self.slots_bytes = 0 if after else sum(cost.slots_bytes for cost in costs)
        steps = [cost.step_bytes + cost.slots_bytes for cost in costs] if after else []
        self.step_bytes = max(steps, default=0)
        nbytes = next((cost.waiting_bytes for cost in costs if cost.waiting_bytes), 0)
        hidden = 0.0 if after else HIDDEN_BY_BACKWARD
        self.waiting = Waiting(nbytes, ms_per_byte(device, nbytes) if nbytes else 0.0, hidden)

    def begin(self, trained: Iterable[nn.Parameter]) -> None:
        """Have the gradients that are there before a part of a step, backward included."""
        if self._loop.gradients != ACCUMULATED:
            self._loop.prepare(trained)


class _Stepped:
    """Stands for an optimizer's step in backward: takes its memory, and lets gradients go.

    Those of parameters that are stepped together go with the last of them.
    """

    def __init__(self, bucket: Sequence[Any], temporary_bytes: int) -> None:
        self._bucket, self._bytes = bucket, temporary_bytes

    def __call__(self, parameter: Any) -> None:
        if any(p.grad is None and p.requires_grad for p in self._bucket):
            return
        torch.empty(self._bytes, dtype=torch.uint8, device=parameter.device)
        for each in self._bucket:
            each.grad = None


def _is_one(optimizer: Any) -> bool:
    is_several = isinstance(optimizer, Iterable) and not isinstance(optimizer, (Optimizer, str))
    return optimizer is not None and not is_several
