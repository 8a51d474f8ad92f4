"""Weights that a model writes into while it runs, as they were before its steps were measured.

No optimizer steps while plan measures, but a model may write into its weights itself: a network
that follows another, a codebook, a weight that is made shorter. A copy of all weights might not fit
anywhere, so what is copied, to the host, is what the first step writes into, before it does so; its
operations tell. Where a weight lay, and which parts there were, is noted of all. Not thread-safe; a
look at each operation of one step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vramx.recompute.watch import written_by

_PLAIN = (Tensor, nn.Parameter)


class KeptWeights:
    """The weights and parts of modules as they are now."""

    def __init__(self, modules: Collection[nn.Module]) -> None:
        own = [table for m in modules for table in (m._parameters, m._buffers, m._modules)]
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [(t, dict(t)) for t in own]
        # By memory. What lies in it stays in it, wherever a weight is put meanwhile.
        self._weights: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        for weight in nn.ModuleList(modules).parameters():
            if type(weight) in _PLAIN and weight.layout is torch.strided:
                place = weight.untyped_storage()._cdata
                self._weights.setdefault(place, []).append((weight, weight.detach()))
        self._contents: dict[int, list[Tensor]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep what is written into meanwhile."""
        with _Writes(self):
            yield

    def keep(self, targets: list[Any]) -> None:
        """Copy weights whose memory is about to be written into, once."""
        for target in targets:
            if isinstance(target, (list, tuple)):
                self.keep(list(target))
            elif isinstance(target, Tensor) and target.layout is torch.strided:
                place = target.untyped_storage()._cdata
                if place in self._weights and place not in self._contents:
                    lying = [tensor for _, tensor in self._weights[place]]
                    self._contents[place] = [each.to("cpu", copy=True) for each in lying]

    def put_back(self) -> None:
        """Have the model its parts, and these their weights, with what they held."""
        for table, then in self._tables:
            if list(table) != list(then) or any(table[name] is not x for name, x in then.items()):
                table.clear()
                table.update(then)
        for place, weights in self._weights.items():
            contents = self._contents.get(place, ())
            for tensor, content in zip((tensor for _, tensor in weights), contents, strict=False):
                tensor.data.copy_(content)
            for weight, tensor in weights:
                moved = weight.data_ptr() != tensor.data_ptr()
                if moved and weight.shape == tensor.shape and weight.dtype == tensor.dtype:
                    weight.data = tensor


class _Writes(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, kept: KeptWeights) -> None:
        super().__init__()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        targets = written_by(func, args, kwargs)
        if targets:
            self._kept.keep(targets)
        return func(*args, **kwargs)
