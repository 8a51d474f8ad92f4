"""What a region that writes into its own weights and buffers is told of, once, or is an error.

No state but what errors.py keeps of what was said, and on each thread, while a call runs again, the
ids of what was written into since.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from vramx.errors import ModifiedInPlaceError, warn_once


class _Written(threading.local):
    def __init__(self) -> None:
        self.ids: set[int] = set()


_written = _Written()


@contextlib.contextmanager
def refusing_changes() -> Iterator[None]:
    """Know what is told of within, which refuse_change() is to refuse."""
    outer, _written.ids = _written.ids, set()
    try:
        yield
    finally:
        _written.ids = outer


def refuse_change(saved: Tensor) -> None:
    """Raise where a recomputation saves what was written into since the call, as torch does."""
    owner = saved if saved._base is None else saved._base
    if id(owner) in _written.ids:
        raise ModifiedInPlaceError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {owner.type()} {list(owner.shape)} was written into between a call under "
            "vramx.checkpoint, or of a block at 'recompute_all', and its recomputation, which "
            "would have the new values; take a step of an optimizer after backward"
        )


def tell_of_change(written: Iterable[Tensor]) -> None:
    """Say once that what a recomputation reads was written into since the call."""
    _written.ids.update(map(id, written))
    warn_once(
        "parameters, or tensors that a function closes over, were written into between a call "
        "under vramx.checkpoint, or of a block at 'recompute_all', and its recomputation, as by a "
        "step of an optimizer ahead of backward: what is recomputed reads the new values",
        stacklevel=7,
    )


def tell_of_update(written: Iterable[Tensor]) -> None:
    """Say once that a parameter without a gradient was written into since the call."""
    _written.ids.update(map(id, written))
    warn_once(
        "parameters that need no gradient, as of a network that follows another, were written into "
        "between a call under vramx.checkpoint, or of a block at 'recompute_all', and its "
        "recomputation: what is recomputed reads the new values; write into them after backward",
        stacklevel=7,
    )


def tell_of_write(
    module: nn.Module,
    name: str,
    what: str = "which is no buffer",
    instead: str = "register a buffer",
) -> None:
    """Say once that a region writes into what it has no copy of from before."""
    warn_once(
        f"a region under vramx.checkpoint writes into {name} of {type(module).__name__}, {what}: "
        "this step is recomputed with what it wrote, and from the next one on with what was there "
        f"before; update it outside of the region, or {instead}",
        stacklevel=7,
    )
