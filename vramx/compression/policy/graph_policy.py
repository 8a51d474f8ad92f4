"""Which saved nodes of a compiled graph backward may need the exact value of.

The counterpart, for graphs that torch.compile traced and perhaps decomposed, of what policy.py and
exactness.py say about operations in eager code. Pure functions of an fx graph; a few steps from a
node to its users.
"""

from __future__ import annotations

import torch
from torch import fx

from vramx.compression.policy import exactness
from vramx.compression.policy.columns import is_of_one

# What is not named here needs exact values: it may compare, divide, or take an exponential. These
# are products of exactness.py and smooth functions, their backward, and what is saved for its size.
# Not among them are tanh and sigmoid, whose results hooks pack as angles, and norms that subtract a
# mean, whose inputs hooks pack normalised: here both are kept.
_BACKWARD = frozenset(
    f"{name}_backward"
    for name in (
        *("convolution", "gelu", "silu", "mish", "native_dropout"),
        *("_fused_rms_norm", "max_pool2d_with_indices", "_adaptive_avg_pool2d"),
        *("avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d"),
    )
)
# Sums, and functions whose slope is bounded and changes by as much as the argument does.
_SUMS = frozenset({"sum", "mean", "erf"})
_HARMLESS = exactness.PRODUCTS | exactness.SMOOTH | _BACKWARD | _SUMS
# What gives the same data, moved or shifted: a softmax is the exponential of a difference.
_PASSES = frozenset(
    {
        *("_to_copy", "convert_element_type", "view", "_unsafe_view", "reshape", "unsqueeze"),
        *("squeeze", "expand", "permute", "transpose", "t", "clone", "alias", "slice", "select"),
        *("neg", "rsub", "sub", "add", "where", "cat", "stack", "split", "split_with_sizes"),
        *("unbind", "getitem"),
        *("constant_pad_nd", "unfold", "squeeze_", "detach", "_reshape_alias"),
    }
)
_SATURATE = frozenset({"tanh", "sigmoid"})  # decomposed, their backward is one of products
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1"})
_CONTRACTIONS = frozenset({"mm", "addmm"})
# Of weights in batches it is not followed along which dimension they were scaled (columns.py).
_BATCHED = frozenset({"bmm", "baddbmm"})
_SWAPS = frozenset({"t", "transpose", "permute"})  # of a matrix
_CASTS = frozenset({"_to_copy", "convert_element_type", "clone", "alias", "detach"})
_MOVES = _SWAPS | {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "repeat"}
_OF_MATRIX = 2
_REPEATS = frozenset({"mul", "div", "expand"})
_STATISTIC_RATIO = 16  # as in policy.py
_DEPTH = 8


def saturates(made: fx.Node) -> bool:
    """Tell whether a node of the forward graph is a result whose slope vanishes at its ends."""
    return _name(made) in _SATURATE


def is_normalised(made: fx.Node) -> bool:
    """Tell whether the sum of a node's squares is taken across rows, as a norm of columns does.

    Columns may differ in scale by decades, and a group has elements of many.
    """
    for user in made.users:
        if _name(user).startswith("var"):
            return True
        if _is_power(user, made) and any(map(_sums_columns, user.users)):
            return True
    return False


def multiplies_exponential(made: fx.Node) -> bool:
    """Tell whether a node is a factor beside an exponential, or a multiple of one (roots.py)."""
    for user in made.users:
        if _name(user) == "mul" and any(_comes_of_exp(each) for each in user.args[:2]):
            return True
    return False


def _comes_of_exp(node: object) -> bool:
    for _ in range(_DEPTH):
        if not isinstance(node, fx.Node):
            return False
        if _name(node) in _EXPONENTIALS:
            return True
        if not _passes(node):
            return False
        node = node.args[0]
    return False


def undoes_columns(made: fx.Node) -> bool:
    """Tell whether a weight that multiplies a node has a factor for each column (columns.py), or
    whether the node is that weight."""
    if _is_scaled_in_groups(made):
        return True
    front = [_before_moves(made)]  # the product may read another view of it
    for _ in range(_DEPTH):
        users = [user for each in front for user in each.users]
        if any(map(_is_product_with_scaled, users)):
            return True
        front = [user for user in users if _name(user) in _MOVES | _CASTS]
    return False


def _before_moves(node: fx.Node) -> fx.Node:
    for _ in range(_DEPTH):
        if _name(node) not in _MOVES | _CASTS or not isinstance(node.args[0], fx.Node):
            return node
        node = node.args[0]
    return node


def _is_product_with_scaled(user: fx.Node) -> bool:
    name = _name(user)
    if name not in _CONTRACTIONS | _BATCHED:
        return False
    one, other = user.args[-2:]  # what is added to a product comes first
    if name in _BATCHED:
        return _is_scaled(one, None, _MOVES) or _is_scaled(other, None, _MOVES)
    # What comes first is data as a rule, and a gain that multiplied it, behind a view, is none.
    return _is_scaled(other, 0, _MOVES) or _is_scaled(one, 1)


def _is_scaled_in_groups(made: fx.Node) -> bool:
    value = made.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != _OF_MATRIX:
        return False
    return _is_scaled(made, 0 if value.stride(0) == 1 else 1)


def _is_scaled(weight: object, at: int | None, moves: frozenset[str] = _SWAPS) -> bool:
    """Tell whether a matrix is an input times, or divided by, what changes along a dimension; None:
    along any, as it is behind those of `moves` that are no swaps."""
    for _ in range(_DEPTH):
        if not isinstance(weight, fx.Node) or not weight.args:
            return False
        if _name(weight) in ("mul", "div"):
            one, other = weight.args[:2]
            pairs = ((one, other), (other, one)) if _name(weight) == "mul" else ((one, other),)
            return any(_is_input(whole) and _is_along(part, at) for whole, part in pairs)
        if _name(weight) not in moves | _CASTS:
            return False
        if _name(weight) not in _CASTS:
            at = 1 - at if at is not None and _name(weight) in _SWAPS else None
        weight = weight.args[0]
    return False


def _is_input(node: object) -> bool:
    for _ in range(_DEPTH):
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            return isinstance(node, fx.Node)
        if _name(node) not in _MOVES | _CASTS:
            return False
        node = node.args[0]
    return False


def _is_along(part: object, at: int | None) -> bool:
    value = part.meta.get("val") if isinstance(part, fx.Node) else None
    return isinstance(value, torch.Tensor) and is_of_one(tuple(value.shape), at)


def is_statistic(made: fx.Node) -> bool:
    """Tell whether a node is a factor that is repeated over many elements of another.

    Columns may differ in scale by decades, and each of its elements weighs for all of a column.
    """
    least = _STATISTIC_RATIO * _elements(made)
    return any(_name(user) in _REPEATS and _elements(user) >= least for user in made.users)


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _is_power(user: fx.Node, argument: fx.Node) -> bool:
    name = _name(user)
    return name in ("pow", "square") or (name == "mul" and user.args[:2] == (argument, argument))


def _sums_columns(node: fx.Node) -> bool:
    if _name(node) not in ("sum", "mean") or len(node.args) < 2:
        return False
    last = node.args[0].meta["val"].dim() - 1  # type: ignore[union-attr]
    dims = node.args[1]
    return isinstance(dims, (list, tuple)) and not {last, -1}.intersection(dims)


def is_exact(saved: fx.Node) -> bool:
    """Tell whether the backward graph may need a placeholder's exact value."""
    seen, front = {saved}, [saved]
    for _ in range(_DEPTH):
        below = []
        for node in front:
            for user in node.users:
                if user.op == "output" or user in seen:
                    continue
                if _passes(user) and not _is_sigmoid(user):
                    seen.add(user)
                    below.append(user)
                elif not _is_harmless(user, node) or (node is not saved and _is_gate(node)):
                    return True
        front = below
    return bool(front)  # what comes after has not been looked at


def _is_gate(part: fx.Node) -> bool:
    """Tell whether a part of a tensor is read by a sigmoid alone, as a gated unit's is: what its
    slope is multiplied by is another part. silu reads its argument once more."""
    return [_is_sigmoid(user) for user in part.users] == [True]


def _is_sigmoid(node: fx.Node) -> bool:
    """Tell whether a node is a sigmoid, or the negative that a compiler begins one with: to the
    exponential of this it adds 1, and divides by the sum."""
    if _name(node) != "neg":
        return _name(node) == "sigmoid"
    sums = [user for each in node.users for user in each.users]
    return (
        all(_name(each) == "exp" for each in node.users)
        and all(_name(each) == "add" and 1 in each.args for each in sums)
        and all(_divides_by(each, user) for each in sums for user in each.users)
    )


def _divides_by(divisor: fx.Node, user: fx.Node) -> bool:
    name = _name(user)
    return name == "reciprocal" or (name == "div" and user.args[0] is not divisor)


def _is_harmless(user: fx.Node, argument: fx.Node) -> bool:
    name = _name(user)
    if name == "div":
        return not _divides_by(argument, user)
    if name == "pow":
        return user.args[0] is argument and user.args[1] in exactness.POWERS
    return name in _HARMLESS or _is_sigmoid(user)


def _passes(user: fx.Node) -> bool:
    name = _name(user)
    if name == "sub" and all(isinstance(each, fx.Node) for each in user.args[:2]):
        return False  # what is left of two that are nearly equal, as of a norm's input and its mean
    by_a_number = name in ("mul", "div") and not isinstance(user.args[1], fx.Node)
    return name in _PASSES or by_a_number


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", ""))
