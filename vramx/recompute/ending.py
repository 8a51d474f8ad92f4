"""A recomputation ends where torch has all that it wants, whatever the region makes of that.

torch ends it by an exception. A region that catches every exception, as to fall back from a kernel
that fails, goes on: what it saves then is one tensor too many, or it raises something else. So the
hooks of torch's checkpoint have a pair around them which notes that the end has come, and repeats
it. Half a microsecond for each tensor that is saved again; a pair belongs to one recomputation.
Before torch 2.8, which does not tell its hooks, nothing is around them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _StopRecomputationError

from vramx.compression import enclosing


class _Pack:
    """The hook around torch's; is taken for torch's own by its name."""

    __qualname__ = f"{enclosing.RECOMPUTE_HOOK}around"

    def __init__(self, pack: Any) -> None:
        self._pack = pack
        self.has_ended = False

    def __call__(self, tensor: Tensor) -> Any:
        if self.has_ended:
            raise _StopRecomputationError
        try:
            return self._pack(tensor)
        except _StopRecomputationError:
            self.has_ended = True
            raise


class Ending:
    """Ends what runs meanwhile where torch's checkpoint, whose hooks are the innermost, ends it.

    No generator: its frame and the exception that goes through it would wait for the collector.
    """

    def __init__(self) -> None:
        hooks = enclosing.top_hooks()
        self._pack = _Pack(hooks[0] if hooks else None)
        self._around = saved_tensors_hooks(self._pack, hooks[1]) if hooks else None

    def __enter__(self) -> None:
        if self._around is not None:
            self._around.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._around is not None:
            self._around.__exit__(None, None, None)
        is_told = kind is not None and issubclass(kind, _StopRecomputationError)
        is_failure = kind is None or issubclass(kind, Exception)
        if self._pack.has_ended and is_failure and not is_told:
            raise _StopRecomputationError
