"""Products with a weight: the last one of a block, with the residual, and its gradients.

Used inside operators, so nothing here is differentiated. Products are torch's own. Any thread;
nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, addmm
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.nn import passes

_ROWS = 256
# From twice as many rows on a feed-forward part is computed some at a time: at 8192 rows products
# reach the speed that they have with more (an H100, widths from 2048 on), and gradients of weights,
# which are rounded once for each part, are those of at most 16 micro-batches.
_TILE_ROWS, _MOST_TILES = 8192, 16


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a type, by hand: autocast would cache a cast that autograd has not seen.

    torch takes a microsecond to find that there is nothing to do.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def is_unread(residual: Tensor | None) -> bool:
    """Tell whether project() with a residual computes nothing, and returns NaN.

    The second pass of a block reads no result of it, and a residual goes into the last product.
    torch's checkpoint stops where the last tensor is saved, before the last product of a block; but
    an operator saves when it has computed, and that product is a sixth of a Llama's.
    """
    return residual is not None and passes.results_are_unread()


def project(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return x weight^T + bias + residual.

    The residual, of the result's shape and type, goes into the product where there is no bias: the
    sum is rounded once, where a product and an addition round twice. With a bias the addition is
    torch's, in the product's own memory. Of what is_unread() nothing is read.
    """
    if residual is None:
        return F.linear(x, weight, bias)
    if is_unread(residual):
        return residual.new_full((), float("nan")).expand(residual.shape)
    if bias is not None:
        return F.linear(x, weight, bias).add_(residual)
    rows = residual.reshape(-1, residual.shape[-1])
    # Into a tensor of its own: FSDP warns of blocks that return views.
    y = residual.new_empty(residual.shape)
    project_into(y.view(rows.shape), x.reshape(-1, x.shape[-1]), weight, None, rows)
    return y


def tiles(count: int) -> list[slice]:
    """Return the parts in which so many rows are computed, of one size but for the last."""
    size = max(_TILE_ROWS, -(-count // _MOST_TILES))
    if count < 2 * size:
        return [slice(0, count)]
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def is_long(x: Tensor) -> bool:
    """Tell whether the rows of a tensor are so many that they go through in parts."""
    return len(tiles(x.shape[:-1].numel())) > 1


def project_into(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
    """Write x weight^T + bias + residual over y; all but the bias are matrices of as many rows."""
    added = bias if residual is None or bias is not None else residual
    if added is None:
        torch.mm(x, weight.t(), out=y)
    else:
        addmm(added, x, weight.t(), out=y)
    if added is bias and residual is not None:
        y += residual


class WeightSums:
    """The gradients of a weight and a bias, summed over parts of the rows.

    Args:
        weight: a matrix; its type is the sum's where it is wider than the rows'.
        needs: whether the weight's is wanted, and the bias's.
    """

    def __init__(self, weight: Tensor, needs: Sequence[bool]) -> None:
        self._weight, (self._needs_weight, self._needs_bias) = weight, needs
        self._dweight = weight.new_empty(0)
        self._partial = list[Tensor]()  # sums of the bias's rows, wide: they are rounded once

    def add(self, rows: Tensor, value: Tensor) -> None:
        """Add rows^T value and the sum of the rows."""
        dweight = self._dweight
        if self._needs_bias:
            self._partial += _partial_sums(rows)
        if not self._needs_weight:
            return
        if not dweight.numel():
            found = weight_gradient(rows, value, self._weight)
            self._dweight = cast(found, self._weight.dtype)
        elif dweight.dtype != rows.dtype:
            dweight += weight_gradient(rows, value, self._weight)
        elif dweight.stride(0) == 1 and dweight.stride(1) > 1:
            dweight.t().addmm_(value.t(), rows)
        else:
            dweight.addmm_(rows.t(), value)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return both; an empty tensor for one that is not needed."""
        if not self._partial:
            return self._dweight, self._weight.new_empty(0)
        return self._dweight, _summed(self._partial).to(self._weight.dtype)


def weight_gradients(
    rows: Tensor, value: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a weight and a bias; an empty tensor for one that is not needed.

    The bias's has the weight's type, the weight's the rows'.
    """
    dweight = weight_gradient(rows, value, weight) if needs[0] else rows.new_empty(0)
    dbias = bias_gradient(rows, weight.dtype) if needs[1] else weight.new_empty(0)
    return dweight, dbias


def bias_gradient(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the rows of a matrix in a type, rounded once.

    A sum of more rows would be split among blocks of threads, which meet in up to 132 MiB of the
    caching allocator's memory (planning/reductions.py has the rule). Sums of 256 rows are not.
    """
    if rows.shape[0] < 2 * _ROWS:
        return rows.sum(0, dtype=dtype)
    return _summed(_partial_sums(rows)).to(dtype)


def _partial_sums(rows: Tensor) -> list[Tensor]:
    """Return matrices with the same sum of rows: one of a row for each 256, one for the rest."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.shape[0] < 2 * _ROWS:
        return [rows.sum(0, keepdim=True, dtype=wide)]
    whole = rows.shape[0] - rows.shape[0] % _ROWS
    sums = [rows[:whole].unflatten(0, (-1, _ROWS)).sum(1, dtype=wide)]
    return sums if whole == rows.shape[0] else sums + _partial_sums(rows[whole:])


def _summed(sums: list[Tensor]) -> Tensor:
    """Return the sum of the rows of all; only short ones are copied into one."""
    while len(sums) > 1 or sums[0].shape[0] > 1:  # the length of a tensor is no symbol
        is_long = [each.shape[0] >= 2 * _ROWS for each in sums]
        if any(is_long):
            pairs = zip(sums, is_long, strict=True)
            sums = [
                part for each, long in pairs for part in (_partial_sums(each) if long else [each])
            ]
        else:
            sums = _partial_sums(torch.cat(sums))
    return sums[0][0]


def weight_gradient(rows: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Return rows^T value, laid out as the weight: autograd would copy a gradient that is not."""
    transposed = weight.stride(0) == 1 and weight.stride(1) > 1
    return (value.t() @ rows).t() if transposed else rows.t() @ value


def fake_weight_gradients(weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return tensors as weight_gradients gives, both of the weight's type."""
    rows, columns = weight.shape
    transposed = weight.stride(0) == 1 and weight.stride(1) > 1
    dweight = weight.new_empty(columns, rows).t() if transposed else weight.new_empty(rows, columns)
    return dweight if needs[0] else weight.new_empty(0), weight.new_empty(rows if needs[1] else 0)
