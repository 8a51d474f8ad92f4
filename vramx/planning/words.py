"""The words for what is done with a block, and doing it.

    the levels of vramx.optimize    for blocks that it knows
    left, int8, int4                for others: as they are, or what their operations save packed
    recompute_all                   for others: their input kept, packed where what they do is
                                    smooth, and the rest recomputed
    int8_offload                    what the block's operations save, packed, moves to the host
    recompute_all_offload           that input moves to the host

Blocks are changed in place and restored by undo(). Not thread-safe; costs milliseconds.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from vramx.compression.decorator import compressed_activations, uncompress
from vramx.errors import InvalidValueError
from vramx.nn.optimize import LEFT, LEVELS, optimize, restore
from vramx.planning.blocks import Block
from vramx.recompute.modules import checkpoint_modules

RECOMPUTE_ALL = "recompute_all"
INT8_OFFLOAD, RECOMPUTE_ALL_OFFLOAD = "int8_offload", "recompute_all_offload"
_BITS = {"int8": 8, "int4": 4}
_OFFLOADS = (INT8_OFFLOAD, RECOMPUTE_ALL_OFFLOAD)
# From what keeps most to what keeps least, as far as is known before anything is measured.
WORDS = (LEFT, *(level for level in LEVELS if level != LEFT), *_OFFLOADS)
# For blocks that vramx.optimize does not know; "keep", fused and exact, is for those that it does.
_UNKNOWN_WORDS = {LEFT, *_BITS, RECOMPUTE_ALL, *_OFFLOADS}


def words_for(block: Block, device: torch.device, chosen: Collection[str] | None) -> list[str]:
    """Return the words that a block can have on a device, of those that were chosen.

    Raises:
        InvalidValueError: a word is unknown, or none of the chosen ones is for this block.
    """
    for word in chosen or ():
        if word not in WORDS:
            accepted = ", ".join(map(repr, WORDS))
            raise InvalidValueError(f"level {word!r} is not accepted; accepted are {accepted}")
    found = [
        word
        for word in WORDS
        if (chosen is None or word in chosen)
        and (block.known or word in _UNKNOWN_WORDS)
        and (device.type == "cuda" or word not in _OFFLOADS)  # a host has no link to a host
    ]
    if not found:
        raise InvalidValueError(f"none of levels {chosen!r} is for {block.name} on {device.type}")
    return found


def cheapest(words: Collection[str]) -> str:
    """Return the word that needs least memory, as far as is known before it is measured."""
    return max((w for w in words if w not in _OFFLOADS), key=WORDS.index, default=min(words))


def apply_words(model: nn.Module, words: Mapping[Block, str]) -> Callable[[], None]:
    """Do with each block what its word says; return what undoes it."""
    undo: list[Callable[[], Any]] = []
    try:
        # It restores the model first, so that all of its words must come at once.
        levels = {
            glob.escape(block.name): _level(word)
            for block, word in words.items()
            if block.known and word != INT8_OFFLOAD and word != LEFT
        }
        if levels:
            undo.append(lambda: restore(model))
            optimize(model, levels)
        for block, word in words.items():
            undo += _wrap(block, word)
    except BaseException:
        _undo_all(undo)
        raise
    return lambda: _undo_all(undo)


def _level(word: str) -> str:
    # What is recomputed of a block that is checkpointed from outside is its fused form.
    return "int8" if word == RECOMPUTE_ALL_OFFLOAD else word


def _wrap(block: Block, word: str) -> list[Callable[[], Any]]:
    """Change a block without vramx.optimize where its word asks for it; return what undoes it."""
    module = block.module
    offload = 1.0 if word in _OFFLOADS else None
    if word == RECOMPUTE_ALL_OFFLOAD or (word == RECOMPUTE_ALL and not block.known):
        handle = checkpoint_modules(module, lambda found: found is module, offload=offload)
        return [handle.remove]
    if word == INT8_OFFLOAD or (word in _BITS and not block.known):
        compressed_activations(module, bits=_BITS.get(word, 8), offload=offload)
        return [lambda: uncompress(module)]
    return []


def _undo_all(undo: list[Callable[[], Any]]) -> None:
    while undo:
        undo.pop()()
