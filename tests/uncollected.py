"""What of a program waits for Python's collector: what a cycle holds is memory lost until then."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from torch import Tensor


@contextlib.contextmanager
def nothing_waits_for_the_collector() -> Iterator[None]:
    """Fail if tensors that are made meanwhile outlive it without a collection."""
    gc.collect()
    before = {id(each) for each in _tensors()}
    gc.disable()
    try:
        yield
        left = [tuple(each.shape) for each in _tensors() if id(each) not in before]
    finally:
        gc.enable()
    assert not left, f"left are tensors of {left}"


def _tensors() -> list[Tensor]:
    # By its class: a stand-in is asked for nothing.
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
