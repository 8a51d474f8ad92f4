"""Sparse tensors without data: with as many elements as theirs may have.

What torch itself computes of them without data has no elements, or no kernel: here are the
operations of gradients of embeddings, of the optimizers that take these, and of products with the
adjacency of a graph. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Assume = Callable[[str], None]
_aten = torch.ops.aten
_MATRIX = 2  # dimensions


def sparse_result(func: Any, args: Any, assume: Assume) -> Any:
    """Return what an operation makes of sparse tensors; NotImplemented of all others."""
    make = _RESULTS.get(func)
    if make is None or not any(map(is_sparse, args[:2])):
        return NotImplemented
    made = make(*args)
    if func is _aten._coalesce.default:
        assume("no two elements of a sparse tensor, as an embedding's gradient, are taken for one")
    return made


def assume_elements(func: Any, result: Any, assume: Assume) -> None:
    """Say so where what an operation makes has no elements, as of one that is not known here."""
    if any(is_sparse(x) and not x._nnz() for x in tree_leaves(result)):
        assume(f"what {func} makes, a sparse tensor, is taken for empty")


def is_sparse(value: Any) -> bool:
    """Tell whether a value is a tensor that holds its elements, and where each of them is."""
    return isinstance(value, Tensor) and value.layout == torch.sparse_coo


def _made(like: Tensor, indices: Tensor, values: Tensor, is_coalesced: bool = False) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=is_coalesced, check_invariants=False
    )


def sparse_like(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return a tensor of given elements that is as sparse as another, and a parameter if that is.

    Example:
        >>> x = torch.eye(2).to_sparse()
        >>> sparse_like(x, x._indices(), x._values() * 2).is_coalesced()
        True
    """
    made = _made(tensor, indices, values, tensor.is_coalesced())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _clone(x: Tensor) -> Tensor:
    indices, values = x._indices(), x._values()
    if torch._C._current_graph_task_id() == -1:
        return _made(x, indices.clone(), values.clone(), x.is_coalesced())
    # A parameter takes its gradient as it is; torch copies one that Python refers to, as here.
    return _made(x, indices, values, x.is_coalesced())


def _detach(x: Tensor) -> Tensor:
    return _made(x, x._indices(), x._values(), x.is_coalesced())


def _coalesce(x: Tensor) -> Tensor:
    return _made(x, x._indices().clone(), x._values().clone(), is_coalesced=True)


def _mask(x: Tensor, mask: Tensor) -> Tensor:
    values = x.new_empty(mask._values().shape)
    return _made(x, mask._indices().clone(), values, mask.is_coalesced())


def _add(x: Tensor, y: Any) -> Any:
    if not is_sparse(x) or not is_sparse(y):
        return torch.empty_like(y if is_sparse(x) else x)
    indices = torch.cat([x._indices(), y._indices()], 1)
    return _made(x, indices, torch.cat([x._values(), y._values()]))


def _added(x: Tensor, y: Any) -> Any:
    return _aten.copy_sparse_to_sparse_.default(x, _add(x, y)) if is_sparse(x) else x


def _swapped(x: Tensor, *dims: int) -> Any:
    """Return the transpose of a matrix, which torch makes of a copy."""
    if x.dim() != _MATRIX or x.dense_dim() or dims in ((0, 0), (1, 1)):
        return NotImplemented
    size, elements = x.shape[::-1], (x._indices().clone(), x._values().clone())
    return torch.sparse_coo_tensor(*elements, size, is_coalesced=False, check_invariants=False)


def _product(x: Tensor, y: Tensor) -> Any:
    if (is_sparse(x) and is_sparse(y)) or x.shape[1] != y.shape[0]:
        return NotImplemented  # of unknown elements, or torch's own error
    return (y if is_sparse(x) else x).new_empty((x.shape[0], y.shape[1]))


def _product_added(_x: Tensor, y: Tensor, z: Tensor) -> Any:
    return _product(y, z)


_RESULTS: dict[Any, Callable[..., Any]] = {
    _aten.clone.default: _clone,
    _aten.detach.default: _detach,
    _aten._coalesce.default: _coalesce,
    _aten.sparse_mask.default: _mask,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _added,
    _aten.t.default: _swapped,
    _aten.transpose.int: _swapped,
    _aten.mm.default: _product,
    _aten.addmm.default: _product_added,
    _aten._sparse_addmm.default: _product_added,
}
