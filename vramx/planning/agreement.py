"""What the processes of a training agree on while they plan: one plan, one error.

Each measures on its own, and then all take the largest of each number, so that what is chosen from
them is the same everywhere and fits everywhere. Work is done in phases, after each of which they
tell each other whether it failed: an error of one is an error of all. Where a step has collectives
of its own, as under DDP and FSDP2, a process that fails within it would leave others waiting: these
watch for that (ranks.py). One process agrees with itself at no cost. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vramx.errors import InvalidValueError, VramxError
from vramx.planning.ranks import FailedTogetherError, Ranks
from vramx.planning.timeline import Cost, Place, Timeline

TIMEOUT_S = 600.0
_REPLICAS = ("DistributedDataParallel", "FullyShardedDataParallel")
_PLACE = ("input_bytes", "output_bytes", "late_input_bytes", "late_output_bytes")
_LEVELS = ("forward_level", "backward_level")
_BYTES = ("kept_bytes", "forward_bytes", "backward_bytes")
_HOLDS, _TIMES = ("holds_input", "holds_output"), ("host_ms", "device_ms")


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
            failed = self._ranks.most([float(error is not None)])[0]
        except VramxError as alone:
            raise (error or alone) from alone
        if error is not None:
            raise error
        if failed:
            raise FailedTogetherError(f"another process failed {what}: its own error says why")

    def most(self, number: float) -> float:
        """Return the largest of a number over all processes."""
        found = self._ranks.most([number])[0]
        assert found is not None
        return found

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether a process has it set."""
        return [bool(found) for found in self._ranks.most([float(flag) for flag in flags])]

    def check_alike(self, what: str, *facts: Any) -> None:
        """Raise unless all processes have the same facts."""
        digest = float(zlib.crc32(repr(facts).encode()))
        high, low = self._ranks.most([digest, -digest])
        if high != digest or low != -digest:
            raise InvalidValueError(
                f"the processes differ in {what}: accepted are the same in all of them"
            )

    def timeline(self, timeline: Timeline, words: Sequence[str]) -> Timeline:
        """Return the timeline of the largest costs, with the words that all processes measured."""
        if self._ranks.count == 1:
            return timeline
        self.check_alike("the blocks that their steps call", [p.block for p in timeline.places])
        numbers: list[float | None] = [timeline.outside_ms, *map(float, timeline.gaps)]
        for place in timeline.places:
            numbers += _numbers_of(place, words)
        agreed = iter(self._ranks.most(numbers))
        outside_ms, *gaps = (next(agreed) or 0.0 for _ in range(1 + len(timeline.gaps)))
        places = [_place_of(place, words, agreed) for place in timeline.places]
        return replace(
            timeline, places=places, gaps=tuple(int(gap) for gap in gaps), outside_ms=outside_ms
        )


def _numbers_of(place: Place, words: Sequence[str]) -> list[float | None]:
    numbers: list[float | None] = [getattr(place, name) for name in (*_PLACE, *_LEVELS)]
    numbers.append(-place.linked)
    for word in words:
        cost = place.costs.get(word)
        numbers.append(cost is None)
        fields = (*_BYTES, *_HOLDS, *_TIMES)
        numbers += [None if cost is None else getattr(cost, name) for name in fields]
    return numbers


def _place_of(place: Place, words: Sequence[str], agreed: Iterator[float | None]) -> Place:
    levels: dict[str, Any] = {name: int(next(agreed) or 0) for name in (*_PLACE, *_LEVELS)}
    levels["linked"] = bool(next(agreed))
    costs = {}
    for word in words:
        is_absent = next(agreed)
        values: dict[str, Any] = {name: int(next(agreed) or 0) for name in _BYTES}
        values |= {name: bool(next(agreed)) for name in _HOLDS}
        values |= {name: next(agreed) or 0.0 for name in _TIMES}
        if not is_absent:
            costs[word] = Cost(**values)
    if not costs:
        raise InvalidValueError("no level of a block has enough memory in all of the processes")
    return replace(place, costs=costs, **levels)


def _has_collectives(model: Any) -> bool:
    """Tell whether a step of a model waits for other processes."""
    modules: list[nn.Module] = list(model.modules()) if isinstance(model, nn.Module) else []
    return any(
        base.__name__ in _REPLICAS for module in modules for base in type(module).__mro__
    ) or any(type(p).__name__ == "DTensor" for module in modules for p in module.parameters(False))


@contextlib.contextmanager
def agreeing(model: Any) -> Iterator[Agreement]:
    """Have the processes that train together agree, all of which call this."""
    ranks = Ranks(TIMEOUT_S, "plan", "a smaller budget or sample")
    try:
        yield Agreement(ranks, model)
    finally:
        ranks.close()
