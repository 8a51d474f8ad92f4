"""What the processes of a training agree on while they plan: one plan, one error.

Each measures on its own, and then all take the largest of each number, so that what is chosen from
them is the same everywhere and fits everywhere. Work is done in phases, after each of which they
tell each other whether it failed: an error of one is an error of all. Where a step has collectives
of its own, as under DDP and FSDP2, a process that fails within it would leave others waiting: these
watch for that (ranks.py). One process agrees with itself at no cost. Not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

from torch import nn

from vramx.errors import InvalidValueError, VramxError
from vramx.planning.ranks import FailedTogetherError, Ranks
from vramx.planning.timeline import Cost, Place, Timeline

TIMEOUT_S = 600.0
_REPLICA = "DistributedDataParallel"
_NUMBERS = (
    *("input_bytes", "output_bytes", "late_input_bytes", "late_output_bytes"),
    *("forward_level", "backward_level"),
)


class Agreement:
    """What processes that plan together do in step.

    Attributes:
        is_shared: whether their steps wait for each other.
    """

    def __init__(self, ranks: Ranks, model: Any) -> None:
        self._ranks = ranks
        self.is_shared = ranks.count > 1 and _has_collectives(model)

    @property
    def said(self) -> list[str]:
        """What there is to say of a plan that processes agree on."""
        if self._ranks.count == 1 or self.is_shared:
            return []
        return [
            "not counted is the copy of the gradients that DDP has: plan the model that it made"
        ]

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Do what is within as all others do; what fails in one fails in all.

        Raises:
            FailedTogetherError: another process failed.
        """
        if self._ranks.count == 1:
            yield
            return
        error: Exception | None = None
        within = self._ranks.attempt(what) if self.is_shared else contextlib.nullcontext()
        try:
            with within:
                yield
        except Exception as raised:
            error = raised
        try:
            failed = any(self._ranks.gathered(error is not None))
        except VramxError as alone:
            raise (error or alone) from alone
        if error is not None:
            raise error
        if failed:
            raise FailedTogetherError(f"another process failed {what}: its own error says why")

    def most(self, number: float) -> float:
        """Return the largest of a number over all processes."""
        return max(self._ranks.gathered(number))

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether a process has it set."""
        return list(map(any, zip(*self._ranks.gathered(flags), strict=True)))

    def check_alike(self, what: str, *facts: Any) -> None:
        """Raise unless all processes have the same facts."""
        if len(set(self._ranks.gathered(repr(facts)))) > 1:
            raise InvalidValueError(
                f"the processes differ in {what}: accepted are the same in all of them"
            )

    def timeline(self, timeline: Timeline, words: Sequence[str]) -> Timeline:
        """Return the timeline of the largest costs, with the words that all processes measured."""
        if self._ranks.count == 1:
            return timeline
        self.check_alike("the blocks that their steps call", [p.block for p in timeline.places])
        every = self._ranks.gathered(timeline)
        together = zip(*(each.places for each in every), strict=True)
        return Timeline(
            places=[_largest(places, words) for places in together],
            gaps=tuple(map(max, zip(*(each.gaps for each in every), strict=True))),
            outside_ms=max(each.outside_ms for each in every),
        )


def _largest(places: Sequence[Place], words: Sequence[str]) -> Place:
    """Return a call with the largest numbers of all processes, and the words that all measured."""
    costs = {
        word: Cost(*map(max, zip(*(astuple(place.costs[word]) for place in places), strict=True)))
        for word in words
        if all(word in place.costs for place in places)
    }
    if not costs:
        raise InvalidValueError("no level of a block has enough memory in all of the processes")
    numbers = {name: max(getattr(place, name) for place in places) for name in _NUMBERS}
    linked = all(place.linked for place in places)
    return replace(places[0], costs=costs, linked=linked, **numbers)


def _has_collectives(model: Any) -> bool:
    """Tell whether a step of a model waits for other processes."""
    modules: list[nn.Module] = list(model.modules()) if isinstance(model, nn.Module) else []
    return any(
        base.__name__ == _REPLICA for module in modules for base in type(module).__mro__
    ) or any(type(p).__name__ == "DTensor" for module in modules for p in module.parameters(False))


@contextlib.contextmanager
def agreeing(model: Any) -> Iterator[Agreement]:
    """Have the processes that train together agree, all of which call this."""
    with contextlib.closing(Ranks(TIMEOUT_S, "plan", "a smaller budget or sample")) as ranks:
        yield Agreement(ranks, model)
