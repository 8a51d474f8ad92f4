"""What is saved before it has its values: the noise of rrelu, which the kernel draws.

torch ends a recomputation as soon as the last tensor that is wanted has been saved again, by an
exception. Where that is the noise, no kernel fills it, and the gradient is whatever lay in memory
(pytorch#193671). So where a region's result has nothing saved behind such a kernel, one thing more
is saved. A look at the nodes from a result to the first that saves something; no state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vramx.recompute.structure import flatten

_FILLED_LATER = frozenset({"RreluWithNoiseBackward0"})
# Nodes that save no tensor.
_SAVES_NOTHING = frozenset(
    f"{name}Backward{version}"
    for name in (
        *("Add", "Sub", "Neg", "Sum", "Mean", "Cat", "Stack", "Clone", "ToCopy", "Alias"),
        *("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand", "T"),
        *("Transpose", "Permute", "Slice", "Select", "Split", "SplitWithSizes", "Unbind"),
        *("Mul", "Div", "Roll", "Flip", "Repeat", "ConstantPadNd", "AsStrided"),
    )
    for version in range(3)
)
_MOST = 64  # nodes; a bound, so that a look is cheap


def saved_behind(result: Any) -> Any:
    """Return a region's result, with something saved behind a kernel that fills what it saved."""
    if isinstance(result, Tensor):
        return _behind(result)
    leaves, structure = flatten(result)
    found = [_behind(leaf) for leaf in leaves]
    same = all(one is other for one, other in zip(found, leaves, strict=True))
    return result if same else structure.rebuild(found)


def _behind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not _ends_unfilled(leaf):
        return leaf
    return leaf * torch.ones((), dtype=leaf.dtype, device=leaf.device)


def _ends_unfilled(tensor: Tensor) -> bool:
    nodes: list[Any] = [tensor.grad_fn]
    for _ in range(_MOST):
        if not nodes:
            break
        node = nodes.pop()
        name = type(node).__name__
        if name in _FILLED_LATER:
            return True
        if name in _SAVES_NOTHING:
            nodes += [following for following, _ in node.next_functions]
    return False
