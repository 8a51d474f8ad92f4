"""Whether the keys of an attention are known to have no bias.

Backward of attention subtracts rowsum(dy y) from dy v^T. Where y and v are packed, what is left
over goes into the gradient of the queries times the mean key, which a bias of the key projection
can make larger than all else; results and exact gradients do not change with it. Hooks cannot take
the mean away, so value and result are packed only where no bias can have been added. What is not
known keeps them. Pure functions; a walk of some nodes, once for each call of an attention.
"""

from __future__ import annotations

from typing import Any

import torch

from vramx.compression.calls import Operation

_KEY = 1  # its position
# A product of data with a weight, to which nothing was added.
_PRODUCTS = frozenset({"MmBackward0", "BmmBackward0"})
# Views and copies, norms without a shift of their own, and what a rotation is written with: signs,
# factors, halves and sums of these. Each node's inputs are looked at in turn.
_THROUGH = frozenset(
    f"{name}Backward{version}"
    for name in (
        "View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "ToCopy", "Expand",
        "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Unsqueeze", "Squeeze", "Alias",
        "Clone", "Narrow", "Unflatten", "Flatten", "Neg", "Cat", "Stack", "Chunk",
    )
    for version in range(3)
)  # fmt: skip
_MOST_NODES = 64


def has_plain_keys(operation: Operation) -> bool:
    """Tell whether an attention's keys are products with weights, moved but not added to.

    Keys that were turned by their positions are sums of two such parts, each times a number that
    has no gradient; they count as well.
    """
    keys = operation.argument(_KEY)
    return keys is not None and _is_plain(keys)


def _is_plain(keys: torch.Tensor) -> bool:
    front: list[Any] = [keys.grad_fn]
    for _ in range(_MOST_NODES):
        if not front:
            return True
        node = front.pop()
        name = "" if node is None else node.name()
        if name in _PRODUCTS:
            continue
        inputs = [n for n, _ in node.next_functions if n is not None] if node else []
        rotates = name == "MulBackward0" and len(inputs) == 1
        rotates = rotates or (name == "AddBackward0" and len(inputs) == 2 and _are_turned(inputs))
        if not inputs or not (name in _THROUGH or rotates):
            return False
        front += inputs
    return False


def _are_turned(terms: list[Any]) -> bool:
    """Tell whether a sum is of two products with numbers, and so no bias is among its terms."""
    return all(term.name() == "MulBackward0" for term in terms)
