"""Functions of the elements of an input, whose slopes change with them.

Most of a group may be large beside the elements that a gradient comes from: all of tanh's comes
from those that do not saturate it. A step of a packed input is no small part of these. So what
saturates keeps the inputs exact, and so does a function that leaves the region as it is, for what
follows may saturate. Behind a layer, a sum over many elements, the noise of packing is as small
beside its result as in any other place: an input that a function within the region reads is packed
as roots (see roots.py), which serve small elements better.

An input whose elements a softmax takes, alone or as terms, is kept exactly: an exponential makes a
factor of an error, and scores that a mask has been put on, as one block of attention gives them to
the next, have elements beside which all others are nothing, or that are infinite. A norm between
both leaves multiples of the elements. So are queries and keys, of which scores are products, in a
fused attention or one that is written out: where it is sharp, their errors are many times the
scores'. Behind a layer they are not elements of an input.

So are inputs of whose elements, or their multiples, sine and cosine are taken, as where positions
are encoded: an error is to be small beside a turn, not beside the largest of a group.

So are inputs whose elements are taken from one another, or multiplied with one another, where the
length of what they give counts, as that of two atoms' difference or of what a gate lets through: it
may be small beside both, and their errors are not.

So are inputs of whose rows parts of several sizes are read apart, as features that were put beside
positions: a part may be small beside its row, and counts in what reads it alone; and those that a
weight multiplies which has a factor for each column (columns.py).

Costs a look-up an operation while a region is watched; holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, strided
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from vramx.compression.policy.columns import is_scaled
from vramx.compression.policy.weights import is_any_weight
from vramx.recompute.norms import NORMS, least_row
from vramx.recompute.tensors import has_graph, storage_of

_SATURATING = frozenset(
    f"aten::{name}"
    for name in ("tanh", "sigmoid", "erf", "special_expit", "log_sigmoid_forward", "glu")
)
# Of one tensor, and numbers: the elements are the same, or multiples.
SAME = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "alias", "detach", "clone", "contiguous", "_to_copy"),
        *("permute", "transpose", "t", "expand", "slice", "select", "squeeze", "unsqueeze"),
        *("split", "split_with_sizes", "unbind", "mul", "div", "neg", "add", "sub", "rsub"),
    )
)
_DIFFERENCES = frozenset({"aten::sub", "aten::rsub"})
_SUMS = frozenset({"aten::sum", "aten::mean", "aten::nansum", "aten::cumsum"})
# What is small beside its group counts in their results as much as what is large.
_LENGTHS = NORMS | frozenset(
    f"aten::{name}"
    for name in (
        *("sqrt", "rsqrt", "reciprocal", "linalg_vector_norm", "norm", "frobenius_norm"),
        *("std", "std_mean", "var", "var_mean"),
    )
)
# Their slopes have no bound at zero.
_STEEP = frozenset({"aten::sqrt", "aten::rsqrt"})
_ROUGH = _SATURATING | _STEEP | _LENGTHS
_BENDING = frozenset(
    f"aten::{name}" for name in ("gelu", "silu", "mish", "softplus", "square", "pow")
)
_PRODUCTS = frozenset({"aten::mul", "aten::addcmul", "aten::lerp"})
_SOFTMAXES = frozenset(
    f"aten::{name}"
    for name in ("_softmax", "_log_softmax", "_safe_softmax", "_masked_softmax", "logsumexp")
)
_ATTENTION = "attention"
_VALUE, _OF_SCORES = 2, ("query", "key", "attn_mask")  # the value is no part of the scores
# Their results have elements of all of their tensors, or sums of them.
_TERMS = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "rsub", "where", "masked_fill", "cat", "stack", "constant_pad_nd"),
        *("index", "index_select", "gather", "flip", "roll", "repeat", "as_strided", "unfold"),
        *("_reshape_alias", "tril", "triu", "slice_scatter", "select_scatter", "diagonal"),
    )
)
_PHASES = frozenset({"aten::sin", "aten::cos"})
# Products of matrices, by the position of their first factor.
_CONTRACTIONS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
# Of parts of a tensor, by the position of the dimension, which is the first one by default. Parts
# of one size, as split() and unbind() give them, are taken to be alike: halves of a rotation are.
_PARTS = {"aten::slice": 1, "aten::select": 1, "aten::index_select": 1, "aten::split_with_sizes": 2}
_STEP = 4  # its position in a slice
_DIMS = 3  # the most of what has no planes
_GROUP = 128  # elements of the codec's groups, unless their user says otherwise
_FEW = 8  # elements, in whose sum errors do not cancel


class _Elements(NamedTuple):
    """The numbers of inputs whose elements a tensor has functions of, and the last that bends;
    `terms` has those whose elements are among its terms as well. `of_two`: what it is of those of
    two tensors, "difference" or "product". `turning` has those whose elements a phase would have
    that is made of it. `factors` has those whose elements are a factor in products of matrices
    among its terms; the other is no weight."""

    read: frozenset[int] = frozenset()
    bend: str = ""
    terms: frozenset[int] = frozenset()
    of_two: str = ""
    turning: frozenset[int] = frozenset()
    factors: frozenset[int] = frozenset()


_NONE = _Elements()
_NO_NUMBERS = _NONE.terms


class Elements:
    """How functions read some inputs by elements: `rooted` and `exact` have numbers of these.

    Calls `on_rough` with what a function does to one of them that wants it exactly. The caller
    holds the inputs meanwhile. Functions in `allowed` may do it.
    """

    def __init__(
        self, inputs: Sequence[Tensor], on_rough: Callable[[str], None], allowed: frozenset[str]
    ) -> None:
        self._on_rough = on_rough
        self._allowed = frozenset(f"aten::{name}" for name in allowed)
        self._factors: set[int] = set()
        self.exact: frozenset[int] = frozenset()
        self._memory: dict[int, _Elements] = {}
        for number, x in enumerate(inputs):
            storage = storage_of(x)
            numbers = self._memory.get(storage, _NONE).read | {number}
            self._memory[storage] = _Elements(numbers, terms=numbers, turning=numbers)
        # Of other memory, which may be used again as soon as it is free: by the tensor.
        self._functions = WeakTensorKeyDictionary()

    @property
    def rooted(self) -> frozenset[int]:
        return frozenset(self._factors)

    def look_at(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Look at a call of the dispatcher."""
        if name in self._allowed:
            return
        if name in _PARTS and _takes_apart(name, args, result):
            self.exact |= self._memory.get(storage_of(args[0]), _NONE).read
        rough = self._roughness(name, self._of(args[0])) if name in _ROUGH else ""
        if rough:
            self._on_rough(rough)
        elif name in _SOFTMAXES:
            of = self._of(args[0])
            self.exact |= of.terms | of.factors
        elif _ATTENTION in name:
            self.attend(args, {})
        elif name in _PHASES:
            self.exact |= self._of(args[0]).turning
        elif name in _SUMS or name in NORMS:
            self._reduce(self._of(args[0]), result, is_norm=name in NORMS)
        elif name in _CONTRACTIONS:
            self._contract(args[_CONTRACTIONS[name] :], result)
        elif name in _BENDING or name in _PRODUCTS or name in SAME or name in _TERMS:
            self._follow(name, args, result)

    def _reduce(self, of: _Elements, result: Any, *, is_norm: bool) -> None:
        """Follow a sum, which has differences and phases; and a norm, which multiplies elements."""
        if is_norm:
            now, result = _Elements(terms=of.terms, turning=of.turning), result[0]
        else:
            now = _Elements(of_two=of.of_two, turning=of.turning)
        if now != _NONE:
            self._functions[result] = now

    def attend(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at a fused attention; where torch runs it as products, these do not tell of it."""
        scores = [*args[:_VALUE], *args[_VALUE + 1 :], *map(kwargs.get, _OF_SCORES)]
        found = [self._of(x) for x in scores]
        self.exact = self.exact.union(*(each.terms | each.factors for each in found))

    def _roughness(self, name: str, of: _Elements) -> str:
        """Return what a function does to inputs that wants them exactly; empty: nothing."""
        if name in _LENGTHS and of.of_two:
            return f"{name} of a {of.of_two} of inputs"
        if name in _SATURATING and of.read:
            return f"the slope of {name}, where an input saturates it,"
        return f"the slope of {name} near zero" if name in _STEEP and of.read else ""

    def leave(self, results: Iterable[Any]) -> None:
        """Look at what a region gives."""
        for bend in filter(None, (self._of(each).bend for each in results)):
            self._on_rough(f"the slope of {bend}, which it gives as it is,")

    def _follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        several = len(tensors) > 1
        found = [each for each in map(self._of, tensors) if each != _NONE]
        if not found:
            return
        terms = found[0].terms.union(*(each.terms for each in found))
        of_two = _of_two(name, tensors, found) or next(filter(None, (x.of_two for x in found)), "")
        now = _NONE
        if name in _PRODUCTS or (not several and (name in SAME or name in _BENDING)):
            now = self._function_of(name, found, several)
        turning = found[0].turning.union(*(each.turning for each in found))
        factors = found[0].factors.union(*(each.factors for each in found))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            # Of what is changed in place.
            before = self._functions.get(each, _NONE)
            self._functions[each] = _Elements(
                before.read | now.read,
                now.bend or before.bend,
                before.terms | terms,
                of_two or before.of_two,
                before.turning | turning,
                before.factors | factors,
            )

    def _contract(self, args: Sequence[Any], result: Any) -> None:
        """Follow a product of matrices: of an input and a tensor that a graph has made, and one
        that sums a few elements each."""
        one, other = self._of(args[0]), self._of(args[1])
        if is_scaled(args[1], -2) or is_scaled(args[0], -1):
            self.exact |= one.terms | other.terms
        factors = one.terms if _is_made(args[1]) else _NO_NUMBERS
        factors = factors | other.terms if _is_made(args[0]) else factors
        turning = one.turning | other.turning
        if args[0].shape[-1] > _FEW:
            turning = _NO_NUMBERS
        if factors or turning:
            self._functions[result] = _Elements(turning=turning, factors=factors)

    def _function_of(self, name: str, found: list[_Elements], several: bool) -> _Elements:
        found = [each for each in found if each.read]
        if not found:
            return _NONE
        read = found[0].read.union(*(each.read for each in found))
        bends = name in _BENDING or len(found) > 1
        if bends or several:
            self._factors |= read
        return _Elements(read, name if bends else found[0].bend)

    def _of(self, x: Any) -> _Elements:
        if not isinstance(x, Tensor) or x.layout is not strided:  # others have no storage
            return _NONE
        found: _Elements | None = self._functions.get(x)
        return self._memory.get(storage_of(x), _NONE) if found is None else found


def _takes_apart(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Tell whether less than half of each row is read, whose groups have more of the row."""
    x, at = args[0], _PARTS[name]
    dim = args[at] if len(args) > at else 0
    if x.layout is not strided or x.stride(dim) >= least_row(x, of_planes=x.dim() > _DIMS):
        return False
    parts = result if isinstance(result, (list, tuple)) else (result,)
    is_stepped = name == "aten::slice" and args[_STEP:] not in ((), (1,))
    if is_stepped or not 0 < 2 * min(each.numel() for each in parts) < x.numel():
        return False
    row = x.shape[dim] * x.stride(dim)
    lengths = [each.numel() * row // x.numel() for each in parts]
    return any(number % _GROUP for number in (row, *lengths))


def _is_made(x: Tensor) -> bool:
    """Tell whether a graph has made a tensor that is no weight, nor a view or a cast of one."""
    return has_graph(x) and not is_any_weight(x, None)


def _of_two(name: str, tensors: Sequence[Tensor], found: Sequence[_Elements]) -> str:
    """Return what a function gives of the elements of two tensors that may be small beside both."""
    if len([each for each in found if each.terms]) < 2:
        return ""
    if name in _PRODUCTS:
        return "" if tensors[0] is tensors[1] else "product"  # a square is as its root
    return "difference" if name in _DIFFERENCES else ""
