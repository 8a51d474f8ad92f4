"""Weights that have a factor for each column of a layer's data, as where they undo its scale.

The gradient of such a weight's own parameter is divided by the columns' scale: small columns count
in it as much as large ones, and a group of a row has the step of its largest. With columns of 1e4
beside others of 0.05 a gradient had a cosine of 0.5 with the exact one. A factor for each row of
the weight, as weight norms have and scales of quantised channels, is nothing to the data.

A weight that is a parameter, as nearly all are, costs a look; others a walk of a few nodes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vramx.compression.policy.calls import Operation

# By position, the dimension of a factor along which products are added up.
_FACTORS_AT: dict[str, dict[int, int]] = {
    "linear": {1: -1},
    "addmm": {1: -1, 2: -2},
    "matmul": {0: -1, 1: -2},
    "mm": {0: -1, 1: -2},
}
# Along which dimension these add up is not looked at: a factor for each row counts there too.
_OTHERS = frozenset({"bmm", "baddbmm", "einsum", "tensordot"})
LAYERS = _OTHERS | frozenset(_FACTORS_AT)
_SWAPS = frozenset({"TBackward0", "TransposeBackward0", "NumpyTBackward0", "MtBackward0"})
_COPIES = frozenset({"ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ContiguousBackward0"})
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "Permute")
)
_FACTORS = frozenset({"MulBackward0", "DivBackward0"})
_SEEN_THROUGH = _SWAPS | _COPIES | _VIEWS
_KNOWN = _SEEN_THROUGH | _FACTORS
_OF_MATRIX = 2
_WALK = 8


def undoes_columns(operation: Operation) -> bool:
    """Tell whether a factor of a layer's product is scaled along the dimension that is added up.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(4, 3), torch.ones(2, 3, requires_grad=True)
        >>> scale, norm = torch.ones(3), torch.ones(2, 1)
        >>> made = weight / scale, weight / norm
        >>> [undoes_columns(Operation("linear", (x, each), {})) for each in made]
        [True, False]
    """
    if operation.custom:
        return False
    if operation.name in _OTHERS:
        return any(is_scaled(each, None) for each in operation.tensors)
    dims = _FACTORS_AT.get(operation.name)
    if dims is None:
        return False
    # By position, as nearly all are given: to look for tensors takes longer than all else here.
    given = operation.args if len(operation.args) > max(dims) else operation.tensors
    return any(is_scaled(given[at], dim) for at, dim in dims.items() if at < len(given))


def is_scaled(weight: Tensor, dim: int | None) -> bool:
    """Tell whether a weight was multiplied or divided by what changes along one dimension alone:
    along `dim` of a matrix; of others, or where it is None, along any.

    A weight is a leaf, a view or a cast of one: data that a norm's gain multiplied are none.

    Example:
        >>> import torch
        >>> weight, scale = torch.ones(2, 3, requires_grad=True), torch.ones(3)
        >>> [is_scaled(each, -1) for each in (weight * scale, (weight * scale).t(), weight * 2)]
        [True, False, False]
        >>> is_scaled(weight.exp() * scale, -1)
        False
    """
    node: Any = weight.grad_fn
    if node is None or type(node).__name__ not in _KNOWN:
        return False
    at = dim % 2 if dim is not None and weight.dim() == _OF_MATRIX else None
    for _ in range(_WALK):
        name = type(node).__name__
        if name in _FACTORS:
            return _changes_along(node, at)
        if name not in _SEEN_THROUGH:
            return False
        if name in _VIEWS:
            at = None
        elif at is not None and name in _SWAPS:
            at = 1 - at
        node = node.next_functions[0][0]
    return False


def _changes_along(node: Any, at: int | None) -> bool:
    (one, number), (other, place) = node.next_functions
    try:
        if _is_leaf(one) and is_of_one(_size_of(node, other, place, "_saved_other"), at):
            return True
        is_product = type(node).__name__ == "MulBackward0"
        return is_product and _is_leaf(other) and is_of_one(
            _size_of(node, one, number, "_saved_self"), at
        )  # fmt: skip
    except RuntimeError:  # it has been freed: what it multiplied is not known
        return True


def _is_leaf(node: Any) -> bool:
    for _ in range(_WALK):
        name = type(node).__name__
        if name not in _SEEN_THROUGH:
            return name == "AccumulateGrad"
        node = node.next_functions[0][0]
    return False


def _size_of(node: Any, before: Any, number: int, saved: str) -> tuple[int, ...]:
    if before is not None:
        return tuple(before._input_metadata[number].shape)
    constant = getattr(node, saved)
    return () if constant is None else tuple(constant.shape)


def is_of_one(size: tuple[int, ...], at: int | None) -> bool:
    """Tell whether a size that is expanded to a matrix's is more than one along a dimension alone;
    None: along any.

    Example:
        >>> [is_of_one(size, 1) for size in ((3,), (1, 3), (2, 3), (2, 1), ())]
        [True, True, False, False, False]
    """
    if at is None:
        return sum(length > 1 for length in size) == 1
    whole = (1,) * (2 - len(size)) + size
    return whole[at] > 1 and whole[1 - at] == 1
