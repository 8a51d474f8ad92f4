"""Inputs whose sums saturate a function, or turn it, where no norm has bounded them.

Behind a layer the noise of packing is a small part of the result. Where the result is in the
hundreds, as of raw features or of what stands for padding, that part is more than the range in
which the slope of tanh or of a gate changes, or than a turn of a sine: rows 300 times larger than
others left a gate a gradient with a cosine of 0.8. A norm between keeps what a layer gives near
one, and the noise far below. So an input that reaches such a function through layers and sums
alone is kept exactly. Not told of are scores of an attention: what a block without a norm ahead
gives them is another block's normalised result as a rule, and its queries and keys would all be
kept.

Costs some microseconds an operation while a region is watched; holds no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, strided
from torch.utils.weak import WeakTensorKeyDictionary

from vramx.recompute.norms import NORMS
from vramx.recompute.origins import OF_FORM, tensors_in
from vramx.recompute.tensors import storage_of

# Whose slopes vanish, or come back, far from zero. Those of gelu, silu and softplus end at 1.
_BOUNDING = frozenset(
    f"aten::{name}" for name in ("tanh", "sigmoid", "special_expit", "erf", "glu", "sin", "cos")
)
_SOFTMAXES = frozenset(f"aten::{name}" for name in ("_softmax", "_safe_softmax", "_masked_softmax"))
_OUR_NORMS = frozenset({"vramx::norm", "vramx::channel_norm"})
_BOUNDED = _BOUNDING | _SOFTMAXES | NORMS | _OUR_NORMS
_ROOTS = frozenset(f"aten::{name}" for name in ("sqrt", "std", "linalg_vector_norm", "norm"))
_INVERSES = frozenset({"aten::rsqrt", "aten::reciprocal"})
# Of a size and numbers; a view of it.
_SAME = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "clamp", "clamp_min", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze"),
        *("clone", "detach", "_to_copy", "permute", "transpose", "select", "alias"),
    )
)
_CONTRACTIONS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_ATTENTION, _VALUE = "attention", 2

_Numbers = frozenset[int]
_NONE: _Numbers = frozenset()


class Unbounded:
    """Which inputs the tensors of a region are sums of, or products with weights: `exact` has the
    numbers of those that a function bounds which no norm has."""

    def __init__(self, inputs: Sequence[Tensor], allowed: frozenset[str]) -> None:
        self.exact = _NONE
        self._allowed = frozenset(f"aten::{name}" for name in allowed)
        self._memory: dict[int, _Numbers] = {}
        for number, x in enumerate(inputs):
            storage = storage_of(x)
            self._memory[storage] = self._memory.get(storage, _NONE) | {number}
        self._sums = WeakTensorKeyDictionary()
        # Roots of squares, and whether it is what they divide one by.
        self._sizes = WeakTensorKeyDictionary()

    def look_at(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Look at a call of the dispatcher."""
        if name in OF_FORM:
            return
        numbers = self._sums_of(name, args)
        if not numbers:
            return
        if name in _BOUNDING and name not in self._allowed:
            self.exact |= numbers
        if name in _BOUNDED or self._normalises(name, args):
            numbers = _NONE
        self._note_size(name, args, result)
        for each in tensors_in((result,)):
            if each.is_floating_point() or each.is_complex():
                self._sums[each] = numbers

    def _sums_of(self, name: str, args: tuple[Any, ...]) -> _Numbers:
        """Return the inputs of which a result is a sum; of a product of two such none."""
        if _ATTENTION in name:
            return self._of(args[_VALUE])
        found = [each for each in map(self._of, tensors_in(args)) if each]
        if name in _CONTRACTIONS:
            one, other = args[_CONTRACTIONS[name] :][:2]
            if self._of(one) and self._of(other):
                return _NONE
        return _NONE.union(*found)

    def _normalises(self, name: str, args: tuple[Any, ...]) -> bool:
        sizes = [self._sizes.get(each) for each in tensors_in(args)]
        if name == "aten::div":
            return sizes[1:] == [False]
        return name == "aten::mul" and True in sizes

    def _note_size(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        known = self._sizes.get(args[0]) if isinstance(args[0], Tensor) else None
        if name in _ROOTS:
            known = False
        elif name in _INVERSES:
            known = True if name == "aten::rsqrt" or known is False else None
        elif name not in _SAME:
            return
        if known is not None and isinstance(result, Tensor):
            self._sizes[result] = known

    def _of(self, x: Any) -> _Numbers:
        if not isinstance(x, Tensor) or x.layout is not strided:  # others have no storage
            return _NONE
        found: _Numbers | None = self._sums.get(x)
        return self._memory.get(storage_of(x), _NONE) if found is None else found
