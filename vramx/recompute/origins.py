"""Where the tensors of a region come from: which are made of its inputs, and which measure a size.

What is made of positions, weights, buffers and random numbers alone is the same in a recomputation
from packed inputs, whatever is done with it: a causal mask may compare, a stochastic depth round.
And a quotient has no pole that a norm has not where it divides by a root of squares, such as the
length of a row, as normalize() and norms do that are written out; nor has one by what is not made
of inputs, as a mean over a mask or a temperature.

Told by memory, so that views and changes in place count. A microsecond or two a tensor of an
operation, while a region is watched and in recomputations of those that needed it; one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, strided
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from vramx.recompute.elements import SAME
from vramx.recompute.tensors import storage_of

# Of an argument they read its form alone.
OF_FORM = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
_ROOTS = frozenset(
    f"aten::{name}" for name in ("sqrt", "std", "linalg_vector_norm", "norm", "frobenius_norm")
)
_CLAMPS = frozenset({"aten::clamp", "aten::clamp_min"})
_BOUNDED = SAME | _CLAMPS


class Origins:
    """What is known of the tensors of one run of a region.

    `excused`: whether it excused an operation that is not smooth.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        self.excused = False
        # A reference keeps its number from being that of other memory.
        self._made: dict[int, StorageWeakRef] = {}
        self._sizes = WeakTensorKeyDictionary()
        self._add(x for x in inputs if isinstance(x, Tensor) and x.requires_grad)

    def excuses(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether packed inputs leave an operation as it is, or it is part of a norm."""
        made = self._is_any_made((*args, *kwargs.values()))
        excused = not made or self._is_of_size(name, args, kwargs)
        self.excused |= excused
        return excused

    def note(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any
    ) -> None:
        """Note what an operation made, or wrote to."""
        if name in OF_FORM or not self._is_any_made((*args, *kwargs.values())):
            return
        found = list(tensors_in(results))
        self._add(found)
        if name in _ROOTS or (name in _BOUNDED and self._is_bounded_size(name, args, kwargs)):
            for each in found:
                self._sizes[each] = True

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for each in tensors:
            if each.layout is strided and storage_of(each) not in self._made:
                with torch._C.DisableTorchFunction():
                    self._made[storage_of(each)] = StorageWeakRef(each.untyped_storage())

    def _is_any_made(self, values: Iterable[Any]) -> bool:
        known = self._made
        return any(x.layout is not strided or storage_of(x) in known for x in tensors_in(values))

    def _is_of_size(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if name == "aten::div":
            if kwargs.get("rounding_mode") is not None:
                return False
            return self._is_size(args[1]) or not self._is_any_made(args[1:])
        if name == "aten::reciprocal":
            return self._is_size(args[0])
        return name in _CLAMPS and self._is_bounded_size(name, args, kwargs)

    def _is_bounded_size(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a size is taken with a number, and if bounded then from below."""
        first, *others = args
        if not self._is_size(first) or any(isinstance(x, Tensor) for x in others):
            return False
        above = others[1] if len(others) > 1 else kwargs.get("max")
        return name != "aten::clamp" or above is None

    def _is_size(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x in self._sizes


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Give the tensors among an operation's arguments or results, which are in lists at most."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors_in(each)
