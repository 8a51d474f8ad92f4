"""Functions of the elements of an input, whose slopes change with them.

Most of a group may be large beside the elements that a gradient comes from: all of tanh's comes
from those that do not saturate it. A step of a packed input is no small part of these. So what
saturates keeps the inputs exact, and so does a function that leaves the region as it is, for what
follows may saturate. Behind a layer, a sum over many elements, the noise of packing is as small
beside its result as in any other place: an input that a function within the region reads is packed
as roots (see roots.py), which serve small elements better. Costs a look-up an operation while a
region is watched; holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, strided
from torch.utils.weak import WeakTensorKeyDictionary

_SATURATING = frozenset(
    f"aten::{name}"
    for name in ("tanh", "sigmoid", "erf", "special_expit", "log_sigmoid_forward", "glu")
)
# Of one tensor, and numbers: the elements are the same, or multiples.
_SAME = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "alias", "detach", "clone", "contiguous", "_to_copy"),
        *("permute", "transpose", "t", "expand", "slice", "select", "squeeze", "unsqueeze"),
        *("split", "split_with_sizes", "unbind", "mul", "div", "neg", "add", "sub", "rsub"),
    )
)
_BENDING = frozenset(
    f"aten::{name}" for name in ("gelu", "silu", "mish", "softplus", "square", "pow")
)
_PRODUCTS = frozenset({"aten::mul", "aten::addcmul", "aten::lerp"})
# An error of the largest counts most there: roots would make it larger.
_SOFTMAXES = frozenset(
    f"aten::{name}" for name in ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp")
)


class _Elements(NamedTuple):
    """The numbers of inputs whose elements a tensor has functions of, and the last that bends."""

    read: frozenset[int] = frozenset()
    bend: str = ""


_NONE = _Elements()


class Elements:
    """How functions read some inputs by elements: `rooted` has numbers of these.

    Calls `on_rough` with what a function does to one of them that wants it exactly. The caller
    holds the inputs meanwhile. Functions in `allowed` may do it.
    """

    def __init__(
        self, inputs: Sequence[Tensor], on_rough: Callable[[str], None], allowed: frozenset[str]
    ) -> None:
        self._on_rough = on_rough
        self._allowed = frozenset(f"aten::{name}" for name in allowed)
        self._factors: set[int] = set()
        self._largest: set[int] = set()
        self._memory: dict[int, _Elements] = {}
        for number, x in enumerate(inputs):
            storage = x.untyped_storage()._cdata
            before = self._memory.get(storage, _NONE).read
            self._memory[storage] = _Elements(before | {number})
        # Of other memory, which may be used again as soon as it is free: by the tensor.
        self._functions = WeakTensorKeyDictionary()

    @property
    def rooted(self) -> frozenset[int]:
        return frozenset(self._factors - self._largest)

    def look_at(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Look at a call of the dispatcher."""
        if name in self._allowed:
            return
        if name in _SATURATING:
            if self._of(args[0]).read:
                self._on_rough(f"the slope of {name}, where an input saturates it,")
        elif name in _SOFTMAXES:
            self._largest |= self._of(args[0]).read
        elif name in _BENDING or name in _PRODUCTS or name in _SAME:
            self._follow(name, [each for each in args if isinstance(each, Tensor)], result)

    def leave(self, results: Iterable[Any]) -> None:
        """Look at what a region gives."""
        for bend in filter(None, (self._of(each).bend for each in results)):
            self._on_rough(f"the slope of {bend}, which it gives as it is,")

    def _follow(self, name: str, tensors: list[Tensor], result: Any) -> None:
        several = len(tensors) > 1
        if several and name not in _PRODUCTS:
            return
        found = [each for each in map(self._of, tensors) if each.read]
        if not found:
            return
        read = found[0].read.union(*(each.read for each in found))
        bends = name in _BENDING or len(found) > 1
        if bends or several:
            self._factors |= read
        bend = name if bends else found[0].bend
        for each in result if isinstance(result, (list, tuple)) else (result,):
            self._functions[each] = _Elements(read, bend)

    def _of(self, x: Any) -> _Elements:
        if not isinstance(x, Tensor) or x.layout is not strided:  # others have no storage
            return _NONE
        found: _Elements | None = self._functions.get(x)
        return self._memory.get(x.untyped_storage()._cdata, _NONE) if found is None else found
