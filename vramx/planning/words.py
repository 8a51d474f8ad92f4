"""The words for what is done with a block, and doing it.

    the levels of vramx.optimize    for blocks that it knows
    left, int8, int4                for others: as they are, or what their operations save packed
    recompute_all                   for others: their input kept, packed where what they do is
                                    smooth, and the rest recomputed
    int8_offload                    what the block's operations save, packed, moves to the host
    recompute_all_offload           that input moves to the host

The head of a language model makes no logits under any of them: that is exact, and costs nothing.
Blocks are changed in place, as patch/ records it. Not thread-safe; costs milliseconds.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from vramx.compression.decorator import compressed_activations
from vramx.errors import InvalidValueError, refused
from vramx.nn.families.head import heads_of, why_not
from vramx.nn.families.swap import RECOMPUTE_MLP
from vramx.nn.levels import LEFT, LEVELS
from vramx.nn.optimize import optimize
from vramx.patch.change import Change
from vramx.patch.module import patch_of, remove
from vramx.planning.blocks import Block
from vramx.recompute.modules import checkpoint_modules

RECOMPUTE_ALL = "recompute_all"
INT8_OFFLOAD, RECOMPUTE_ALL_OFFLOAD = "int8_offload", "recompute_all_offload"
_BITS = {"int8": 8, "int4": 4}
_OFFLOADS = (INT8_OFFLOAD, RECOMPUTE_ALL_OFFLOAD)
# From what keeps most to what keeps least, as far as is known before anything is measured.
WORDS = (LEFT, *(level for level in LEVELS if level != LEFT), *_OFFLOADS)
# Whose gradients are the noisiest: taken where it was asked for, or where nothing else fits.
NOISY = "int4"
EVERY = "all"
# For blocks that vramx.optimize does not know; "keep", fused and exact, is for those that it does.
_UNKNOWN_WORDS = {LEFT, *_BITS, RECOMPUTE_ALL, *_OFFLOADS}


def chosen_words(levels: str | Collection[str] | None) -> tuple[str, ...]:
    """Return the words among which a caller chose: None is all but the noisiest, "all" is all.

    Raises:
        InvalidValueError: a word is unknown.

    Example:
        >>> chosen_words("int8"), NOISY in chosen_words(None)
        (('int8',), False)
    """
    if levels is None:
        return tuple(word for word in WORDS if word != NOISY)
    if levels == EVERY:
        return WORDS
    chosen = (levels,) if isinstance(levels, str) else tuple(levels)
    for word in chosen:
        if word not in WORDS:
            raise refused("level", word, (*WORDS, EVERY))
    return chosen


def recomputes(word: str) -> bool:
    """Tell whether a block does again in backward what it did, under a word."""
    return word.startswith("recompute")


def can_have(block: Block, word: str, device: torch.device) -> bool:
    """Tell whether a word is for a block on a device."""
    # A host has no link to a host.
    return (block.known or word in _UNKNOWN_WORDS) and (
        device.type == "cuda" or word not in _OFFLOADS
    )


def words_for(block: Block, device: torch.device, chosen: Collection[str]) -> list[str]:
    """Return the words that a block can have on a device, of those that were chosen.

    Of two that do the same with it, one.

    Raises:
        InvalidValueError: none of the chosen ones is for this block.
    """
    found = [word for word in WORDS if word in chosen and can_have(block, word, device)]
    if not block.has_mlp and "int8" in found and RECOMPUTE_MLP in found:
        found.remove(RECOMPUTE_MLP)
    if not found:
        raise InvalidValueError(f"none of levels {chosen!r} is for {block.name} on {device.type}")
    return found


def cheapest(words: Collection[str]) -> str:
    """Return the word that needs least memory, as far as is known before it is measured."""
    return max((w for w in words if w not in _OFFLOADS), key=WORDS.index, default=min(words))


class Applied:
    """What apply_words() did to a model, which can be undone alone."""

    def __init__(self, changes: Sequence[tuple[nn.Module, Change]]) -> None:
        self._changes = changes

    def is_there(self) -> bool:
        """Tell whether any of it is still there: vramx.restore() undoes it as well."""
        return any(change in _changes_of(module) for module, change in self._changes)

    def undo(self) -> None:
        for module, change in self._changes:
            remove(module, change)

    def __enter__(self) -> None:
        """Have it meanwhile."""

    def __exit__(self, *_: object) -> None:
        self.undo()


def apply_words(model: nn.Module, words: Mapping[Block, str]) -> Applied:
    """Do with each block what its word says."""
    before = [change for module in model.modules() for change in _changes_of(module)]

    def made() -> Applied:
        pairs = [(module, c) for module in model.modules() for c in _changes_of(module)]
        return Applied([pair for pair in pairs if pair[1] not in before])

    try:
        # It undoes what it did to the model first, so that all of its words must come at once.
        levels = {
            glob.escape(block.name): _level(word)
            for block, word in words.items()
            if block.known and word != INT8_OFFLOAD and word != LEFT
        }
        heads = (each for each in heads_of(model) if why_not(each) is None)
        levels |= {glob.escape(each.name): "keep" for each in heads}
        if levels:
            optimize(model, levels)
        for block, word in words.items():
            _wrap(block, word)
    except BaseException:
        made().undo()
        raise
    return made()


def _level(word: str) -> str:
    # What is recomputed of a block that is checkpointed from outside is its fused form.
    return "int8" if word == RECOMPUTE_ALL_OFFLOAD else word


def _wrap(block: Block, word: str) -> None:
    """Change a block without vramx.optimize where its word asks for it."""
    module = block.module
    offload = 1.0 if word in _OFFLOADS else None
    if word == RECOMPUTE_ALL_OFFLOAD or (word == RECOMPUTE_ALL and not block.known):
        checkpoint_modules(module, lambda found: found is module, offload=offload)
    if word == INT8_OFFLOAD or (word in _BITS and not block.known):
        compressed_activations(module, level=word if word in _BITS else "int8", offload=offload)


def _changes_of(module: nn.Module) -> tuple[Change, ...]:
    patch = patch_of(module)
    return patch.changes if patch is not None else ()
