"""Which pass of a recomputed block runs on this thread: what operators save has not long to live.

    FIRST   the result is read; what is saved is thrown away by torch's checkpoint
    SECOND  what is saved is read by the backward pass that follows; the block's result is not
    EITHER  one of them, of a checkpoint that is not ours

In each, what is saved is in memory for the backward pass of one block at most: it is kept exactly
and as it is, for a pack would cost time twice and save a block's worth of memory. Both passes save
tensors of the same shapes and types, as torch's checkpoint wants. Any thread, each with its own
answers, which take less than a microsecond. Compilers see no pass: they decide what is recomputed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vramx.compression import enclosing

NONE, FIRST, SECOND, EITHER = range(4)
# How many hold a storage; nothing is overwritten where torch does not say.
_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


class _Running(threading.local):
    word = NONE


_running = _Running()


@contextlib.contextmanager
def running(word: int) -> Iterator[None]:
    """Say which pass runs while this context is entered."""
    before, _running.word = _running.word, word
    try:
        yield
    finally:
        _running.word = before


def saves_are_brief() -> bool:
    """Tell whether what is saved now lives for a block's backward at most."""
    return not torch.compiler.is_dynamo_compiling() and _running.word != NONE


def saves_are_unread() -> bool:
    """Tell whether nothing that is saved now is ever read, so that it need not be written.

    Hooks of others within the block would read it: the checkpoint's must be the innermost.
    """
    if _running.word not in (FIRST, EITHER) or not enclosing.is_told():
        return False
    return enclosing.name_of(enclosing.top_hook()).startswith(enclosing.FORWARD_HOOK)


def results_are_unread() -> bool:
    """Tell whether nothing reads the result of the block that runs now."""
    return _running.word == SECOND


# -- In backward -----------------------------------------------------------------------------------


def may_be_overwritten(*tensors: Tensor) -> bool:
    """Tell whether nothing else holds the memory of tensors that a checkpoint made again.

    What was saved while saves_are_unread() is made anew for each backward pass, and given to it
    once. Another operator may have saved the same tensor, which then has another holder.
    """
    # The checkpoint detaches what requires grad: so each that saved it has a tensor of its own.
    plain = all(type(each) is Tensor and each.requires_grad for each in tensors)
    if _use_count is None or not plain:
        return False
    return all(_holders(each) == _holders_of_fresh_memory() for each in tensors)


def _holders(tensor: Tensor) -> int:
    return int(_use_count(tensor.untyped_storage()._cdata))


@lru_cache(maxsize=1)
def _holders_of_fresh_memory() -> int:
    # The object that asks may count, too: releases differ.
    return _holders(torch.empty(1))
