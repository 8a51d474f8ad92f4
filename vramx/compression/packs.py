"""Who hears of memory that is made to keep packed tensors: a recorder that tells what is whose.

Nobody, usually; then it costs a look at an empty list. Watchers are called on the thread that
packs, within operators too, where a buffer may be a fake one that has no memory.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

watchers: list[Callable[[Tensor], None]] = []


def made(buffer: Tensor) -> Tensor:
    """Tell the watchers of a buffer that is to hold packed tensors, and return it."""
    for watch in watchers:
        watch(buffer)
    return buffer
