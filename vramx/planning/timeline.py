"""The model of a training step: costs of a call of a block for each word, and the peak they make.

Calls run forward in order and backward in the reverse. What a call keeps lives from its forward to
the end of its backward, so that at any time the calls 0..m-1 hold something, for some m: a prefix.
Levels are what the measured step had allocated at a moment, less what the prefix of calls held in
it; with another arrangement, only what the prefix holds is another. The host runs ahead of the
device, so calls take what the busier of the two does for all of them. Pure values, any thread; a
prediction is linear in the number of calls.

    allocated ^        tail: m = n
              |         /\\_
              |     __/    \\__     backward of call i: m = i + 1
              |  __/  forward  \\__
              |_/  of call i:     \\__ gap, m calls alive
              |    m = i              > time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one call of a block costs under a word.

    Attributes:
        kept_bytes: held from forward to backward, without the block's own input and output.
        holds_input: whether the input stays because of the block; holds_output likewise.
        forward_bytes: the peak of the forward pass above what was there before it.
        backward_bytes: the peak of the backward pass above what was there at its start, when the
            gradient of the output and all that was kept are there.
        host_ms: how long forward and backward keep the host busy; device_ms the device, which on a
            processor is the host, so that this is 0.
    """

    kept_bytes: int
    holds_input: bool
    holds_output: bool
    forward_bytes: int
    backward_bytes: int
    host_ms: float
    device_ms: float


@dataclass(frozen=True)
class Place:
    """One call of a block in the step.

    Attributes:
        block: the block's number; a block that is called twice has two places.
        costs: by word.
        input_bytes: of its input, and output_bytes of its output; 0 where something else holds it
            all the same.
        late_input_bytes, late_output_bytes: of what something else holds, but not until the call's
            own backward, where it counts if the call holds it, too.
        linked: its input is the output of the call before.
        forward_level: the level as its forward begins; backward_level as its backward does.
    """

    block: int
    costs: Mapping[str, Cost]
    input_bytes: int = 0
    output_bytes: int = 0
    late_input_bytes: int = 0
    late_output_bytes: int = 0
    linked: bool = False
    forward_level: int = 0
    backward_level: int = 0

    def kept(self, word: str, before_holds: bool) -> int:
        """Bytes that the call adds; `before_holds`: the call before holds its own output."""
        cost = self.costs[word]
        shared = self.linked and before_holds
        held_input = self.input_bytes if cost.holds_input and not shared else 0
        return cost.kept_bytes + held_input + (self.output_bytes if cost.holds_output else 0)

    def own_peak(self, word: str, before: int, after: int) -> int:
        """The peak within the call, with so many bytes held by the calls before, and with it."""
        cost = self.costs[word]
        late = self.late_input_bytes if cost.holds_input else 0
        late += self.late_output_bytes if cost.holds_output else 0
        forward = before + self.forward_level + cost.forward_bytes
        return max(forward, after + late + self.backward_level + cost.backward_bytes)


@dataclass(frozen=True)
class Timeline:
    """A step: its calls in forward order, and what is outside of them.

    Attributes:
        gaps: peaks outside of calls, less what calls hold, by how many of them hold something:
            n + 1 numbers, the last of which is the loss and its backward.
        outside_ms: the time outside of calls.
    """

    places: Sequence[Place]
    gaps: Sequence[int]
    outside_ms: float = 0.0

    def peak_bytes(self, words: Sequence[str]) -> int:
        """Predict the peak of a step with a word for each call."""
        held, holds, peak = 0, False, self.gaps[0]
        for place, word, gap in zip(self.places, words, self.gaps[1:], strict=True):
            before, held = held, held + place.kept(word, holds)
            holds = place.costs[word].holds_output
            peak = max(peak, place.own_peak(word, before, held), held + gap)
        return peak

    def step_ms(self, words: Sequence[str]) -> float:
        """Predict the time of a step with a word for each call."""
        return self.outside_ms + max(self.busy_ms(words))

    def busy_ms(self, words: Sequence[str]) -> tuple[float, float]:
        """Return how long the calls keep the host busy, and how long the device."""
        costs = [p.costs[word] for p, word in zip(self.places, words, strict=True)]
        return sum(cost.host_ms for cost in costs), sum(cost.device_ms for cost in costs)
