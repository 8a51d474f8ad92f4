"""Calls on gradients of several backward passes at once, which are no tensors with memory.

torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) batch passes: a tensor
stands for one of each, and has no memory that a kernel could read. So an operator is called for
each pass in turn, and what it returns is batched again. No state; any thread. Asking whether there
is such a batch costs a fifth of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _dispatch_tls_is_dispatch_key_included
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_MODE: Any = torch._C._parse_dispatch_key("VmapMode")
_increment_nesting: Any = torch._C._vmapmode_increment_nesting
_decrement_nesting: Any = torch._C._vmapmode_decrement_nesting


def is_batched(args: Sequence[Any]) -> bool:
    """Tell whether a tensor, of these or in lists of them, stands for one of each of passes."""
    if not _dispatch_tls_is_dispatch_key_included(_MODE):
        return False
    return any(isinstance(x, Tensor) and is_legacy_batchedtensor(x) for x in tree_leaves(args))


def call_each(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a function of tensors and lists of them once for each pass; batch what it returns."""
    level = _increment_nesting() - 1
    _decrement_nesting()
    leaves, structure = tree_flatten(list(args))
    # One that this level does not batch gets a dimension of the size that is told, of one.
    opened = [_opened(leaf, level) for leaf in leaves]
    count = max(leaf.shape[0] for leaf in opened if isinstance(leaf, Tensor))
    _decrement_nesting()
    try:
        found = [
            function(*tree_unflatten([_of_pass(leaf, i) for leaf in opened], structure))
            for i in range(count)
        ]
    finally:
        _increment_nesting()
    return tree_map(lambda *each: _batched(each, level), *found)


def _opened(leaf: Any, level: int) -> Any:
    return torch._remove_batch_dim(leaf, level, 1, 0) if isinstance(leaf, Tensor) else leaf


def _of_pass(leaf: Any, i: int) -> Any:
    return leaf[min(i, leaf.shape[0] - 1)] if isinstance(leaf, Tensor) else leaf


def _batched(each: Sequence[Any], level: int) -> Any:
    if not isinstance(each[0], Tensor):
        return each[0]
    return torch._add_batch_dim(torch.stack(list(each)), 0, level)
