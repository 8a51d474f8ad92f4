"""The tensors in what programs have: in subclasses, in sparse layouts, in an optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory of a value: itself, those inside a subclass or a sparse one.

    Example:
        >>> [t.shape[0] for t in plain_tensors(torch.eye(3).to_sparse())]
        [2, 3]
    """
    if not isinstance(value, Tensor):
        return
    inner: Any = value
    if is_traceable_wrapper_subclass(inner):
        for name in inner.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(inner, name))
    elif value.layout is torch.sparse_coo:
        yield from (value._indices(), value._values())
    elif value.layout in _COMPRESSED_ROWS:
        yield from (value.crow_indices(), value.col_indices(), value.values())
    elif value.layout in _COMPRESSED_COLUMNS:
        yield from (value.ccol_indices(), value.row_indices(), value.values())
    else:
        yield value


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer's groups."""
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            if isinstance(parameter, Tensor):
                yield parameter


def states_of(optimizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each parameter with the key and the value of each of its states."""
    for parameter, state in list(optimizer.state.items()):
        if isinstance(state, dict):
            for key, value in state.items():
                yield parameter, key, value
        else:
            yield parameter, parameter, state


def fingerprint(optimizer: Any) -> int:
    """Return a number that differs where an optimizer has other states than before."""
    return hash(
        tuple(
            id(value) if isinstance(value, Tensor) else tuple(map(id, tree_leaves(value)))
            for _, _, value in states_of(optimizer)
        )
    )
