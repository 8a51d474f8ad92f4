"""Which storages live, seen from the operations that make them: the tracer of plan and predict.

A dispatch mode shows each operation's arguments and results to a set of storages, which counts
those that it sees for the first time among results, until they die. What operations use within
themselves is not seen. A listener is told of every storage in the order in which an allocator would
serve it, which is a recording for memory/replay. Not thread-safe; tens of microseconds a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of an allocation: True, its number, and its bytes. Of a free: False, the same.
Listener = Callable[[bool, int, int], None]


class Storages:
    """The storages that were seen and live; torch keeps their Python objects as long as them.

    Args:
        device: the type of device whose storages count; None: any.
        listener: is told of each that comes or goes and counts.
    """

    def __init__(self, device: str | None = None, listener: Listener | None = None) -> None:
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._device = device
        self._listener = listener
        self._count = 0
        self.live_bytes = self.peak_bytes = 0

    def add(self, tensor: Tensor, *, counts: bool) -> None:
        """See a tensor; with `counts`, its storage is memory that was allocated just now."""
        if tensor.layout == torch.sparse_coo:
            self.add(tensor._indices(), counts=counts)
            self.add(tensor._values(), counts=counts)
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return  # sparse and the like have none
        key = id(storage)
        if key in self._seen:
            return
        counts = counts and (self._device is None or tensor.device.type == self._device)
        nbytes = storage.nbytes() if counts else 0
        number = self._tell(nbytes)
        self._seen[key] = weakref.ref(storage, lambda _: self._forget(key, number, nbytes))
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def pass_by(self, nbytes: int) -> None:
        """Count memory that an operation took and gave back within itself."""
        number = self._tell(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + nbytes)
        if self._listener is not None and nbytes:
            self._listener(False, number, nbytes)

    def _tell(self, nbytes: int) -> int:
        number = self._count
        if self._listener is not None and nbytes:
            self._count += 1
            self._listener(True, number, nbytes)
        return number

    def _forget(self, key: int, number: int, nbytes: int) -> None:
        del self._seen[key]
        self.live_bytes -= nbytes
        if self._listener is not None and nbytes:
            self._listener(False, number, nbytes)


class Watch(TorchDispatchMode):
    """Show what every operation is given and what it returns to a set of storages."""

    supports_higher_order_operators = True

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked by torch itself, between operations
            return func(*args)
        # What was there before is no new memory, though a view of it comes out.
        self._see((args, kwargs), counts=False)
        result = func(*args, **(kwargs or {}))
        self._see(result, counts=True)
        return result

    def _see(self, tree: Any, *, counts: bool) -> None:
        with torch._C.DisableTorchFunction():  # a mode of others would take it for the program's
            for leaf in tree_leaves(tree):
                if isinstance(leaf, Tensor):
                    self._storages.add(leaf, counts=counts)
