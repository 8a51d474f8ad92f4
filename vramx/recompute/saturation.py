"""Functions that saturate, where a region gives them an input of it as it is, or a multiple.

All of the gradient of tanh comes from the elements that do not saturate it. Where most do, these
are small beside the largest of their group, and a step of a packed input is no small part of them.
Behind a layer, a sum over many elements, the noise of packing is as small beside its result as in
any other place. Costs a look-up an operation while a region is watched; holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


class Saturations:
    """Call `on_rough` with what a saturating function does to one of some inputs.

    The caller holds the inputs meanwhile. Functions in `allowed` may do it.
    """

    def __init__(
        self, inputs: Sequence[Tensor], on_rough: Callable[[str], None], allowed: frozenset[str]
    ) -> None:
        self._on_rough = on_rough
        self._saturating = _SATURATING - {f"aten::{name}" for name in allowed}
        self._memory = frozenset(x.untyped_storage()._cdata for x in inputs)
        # Of other memory, which may be used again as soon as it is free: by the tensor.
        self._multiples = WeakTensorKeyDictionary()

    def look_at(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Look at a call of the dispatcher."""
        if name in self._saturating:
            if self._is_of_input(args[0]):
                self._on_rough(f"the slope of {name}, where an input saturates it,")
            return
        alone = name in _SAME and not any(isinstance(each, Tensor) for each in args[1:])
        if alone and self._is_of_input(args[0]):
            for each in result if isinstance(result, (list, tuple)) else (result,):
                self._multiples[each] = True

    def _is_of_input(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or x.layout is not strided:  # others have no storage
            return False
        return x in self._multiples or x.untyped_storage()._cdata in self._memory
