"""Arrangements that a user would make by hand for a budget, from what one level for all takes.

An arrangement is a word for each block. Made are one word for all blocks; the first blocks at a
word that keeps less and the others at one that is faster, as many of each as the peaks of both for
all blocks let expect, and one block more; and a given arrangement with one block changed.
Imports no torch. Asks what arrangements take as often as there are words, and else is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

Arrangement = tuple[str, ...]
LEFT = "left"
MOST_SPLITS = 3


class Known(NamedTuple):
    """What a loop of an arrangement takes."""

    peak_bytes: int
    step_ms: float


Ask = Callable[[Arrangement], "Known | None"]


def rivals_of(
    own: Arrangement, words: Sequence[Set[str]], budget_bytes: int, ask: Ask
) -> list[Arrangement]:
    """Return arrangements to compare with one's own, each once.

    Args:
        words: those that each block can have.
        ask: returns what an arrangement takes; None: it ran out of memory.
    """
    every = sorted(set().union(*words))
    uniform = {word: made(words, [word] * len(words)) for word in every}
    known = {word: ask(arrangement) for word, arrangement in uniform.items()}
    found = [*uniform.values(), *_splits(words, known, budget_bytes), *_changed(own, words, known)]
    return list(dict.fromkeys(found))


def made(words: Sequence[Set[str]], wanted: Sequence[str]) -> Arrangement:
    """Return the arrangement that is wanted; a block without such a word is left.

    Example:
        >>> made([{"left"}, {"left", "int8"}], ["int8", "int8"])
        ('left', 'int8')
    """
    return tuple(
        word if word in own else LEFT if LEFT in own else min(own)
        for word, own in zip(wanted, words, strict=True)
    )


def _splits(
    words: Sequence[Set[str]], known: dict[str, Known | None], budget_bytes: int
) -> Iterator[Arrangement]:
    """Yield the fastest of two words each, the smaller one first."""
    guessed: list[tuple[float, Any]] = []
    count = len(words)
    for small, less in known.items():
        for fast, more in known.items():
            if less is None or less.peak_bytes > budget_bytes or small == fast:
                continue
            if more is None:  # out of memory: half of the blocks, and what is near, as a guess
                guessed.append((less.step_ms, (small, fast, count // 2)))
            elif more.peak_bytes > budget_bytes and more.step_ms < less.step_ms:
                share = (budget_bytes - less.peak_bytes) / (more.peak_bytes - less.peak_bytes)
                step_ms = less.step_ms + share * (more.step_ms - less.step_ms)
                guessed.append((step_ms, (small, fast, count - int(share * count))))
    for _, (small, fast, first) in sorted(guessed)[:MOST_SPLITS]:
        for number in (first, first + 1):
            if 0 < number < count:
                yield made(words, [small] * number + [fast] * (count - number))


def _changed(
    own: Arrangement, words: Sequence[Set[str]], known: dict[str, Known | None]
) -> Iterator[Arrangement]:
    """Yield an arrangement with its slowest block at each faster word."""
    times = {word: found.step_ms for word, found in known.items() if found is not None}
    slowest = max(range(len(own)), key=lambda i: times.get(own[i], 0.0))
    for word in sorted(words[slowest]):
        if times.get(word, 0.0) < times.get(own[slowest], 0.0):
            yield (*own[:slowest], word, *own[slowest + 1 :])
