"""Attention of long sequences, with its projections, some heads at a time.

    attention_in_groups  (batch, tokens, inputs) to (batch, tokens, outputs)

In a recomputed block the backward pass of attention takes the most memory that grows with a
sequence: queries, keys and values, their gradients, and what the kernels take within, are a dozen
tensors as large as the block's input. Heads share nothing but that input, so they go through in
groups; between forward and backward of a group nothing is kept of it but its part of attention's
result and a float a row and head. Queries, keys and values are computed once more, which is a
fraction of what attention of so many tokens is. The gradient of the input is a sum over the groups,
each rounded once. No state; any thread; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.nn import arguments
from vramx.nn import attention_kernels as kernels
from vramx.nn.differentiation import differentiable_gradients
from vramx.nn.products import bias_gradient, project_into

_MOST_GROUPS = 8
_PROJECTIONS = 4
Terms = tuple[Tensor, Tensor | None]
# Takes queries and keys, (batch, heads, tokens, size), and parameters; returns both as attention is
# to have them.
Between = Callable[..., Sequence[Tensor]]


class Heads(NamedTuple):
    """What is known of heads: the size of one, and what happens to them before attention.

    learned: the parameters that `between` takes.
    """

    size: int
    between: Between
    learned: tuple[Tensor, ...] = ()


def attention_in_groups(
    x: Tensor,
    terms: Sequence[Terms],
    heads: Heads,
    mask: Tensor | None,
    call: kernels.Call,
) -> Tensor | None:
    """Return the output projection of attention of x; None where no kernel is known for it.

    Args:
        x: (batch, tokens, inputs).
        terms: the weight (outputs, inputs) and the bias of the projections of queries, keys and
            values, and of the output projection.
        heads: see there.
        mask: as scaled_dot_product_attention() has it, the same for all heads.
        call: its kernel is not read; without dropout.

    Memory: keeps x, attention's result and 4 bytes a row and head. Temporary: for each group its
        queries, keys and values, their gradients, and what the kernel takes.
    Sync: none.
    Error bound: torch's own, but for the gradient of x, which is rounded once for each group.
    Double backward: works, by torch's formula in whole matrices.
    """
    dtype = arguments.autocast_dtype(x)
    queries, keys = (weight.shape[0] // heads.size for weight, _ in terms[:2])
    shares = queries % keys == 0 and (mask is None or mask.dim() < 4 or mask.shape[1] == 1)
    if call.dropout_p or x.dim() != 3 or not shares:
        return None
    count = max(n for n in range(1, _MOST_GROUPS + 1) if keys % n == 0)
    # Of the shapes that a group has, in one row of memory.
    q, k = (
        x.new_empty_strided(
            (x.shape[0], n // count, x.shape[1], heads.size), (0, 0, 0, 1), dtype=dtype
        )
        for n in (queries, keys)
    )
    kernel = kernels.choose((q, k, k), mask, call, shares_heads=True)
    if kernel == kernels.NO_KERNEL:
        return None
    tensors = [each for term in terms for each in term]
    plan = _Plan(call._replace(kernel=kernel), heads, queries // count, keys // count, count)
    y: Tensor = _Groups.apply(plan, mask, x.to(dtype), *tensors, *heads.learned)
    return y


class _Plan(NamedTuple):
    """How attention is divided: `queries` and `keys` are heads of a group."""

    call: kernels.Call
    heads: Heads
    queries: int
    keys: int
    parts: int

    def groups(self) -> Iterator[_Group]:
        wide, narrow = self.queries * self.heads.size, self.keys * self.heads.size
        for i in range(self.parts):
            yield _Group(
                self,
                slice(i * wide, (i + 1) * wide),
                slice(i * narrow, (i + 1) * narrow),
            )


class _Group(NamedTuple):
    """Some heads: which outputs of the projections of queries, and of keys and values, are its."""

    plan: _Plan
    of_queries: slice
    of_keys: slice

    def places(self) -> tuple[slice, slice, slice]:
        return self.of_queries, self.of_keys, self.of_keys

    def sizes(self) -> list[int]:
        return [place.stop - place.start for place in self.places()]

    def weight(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the rows of three weights that make its heads."""
        rows = [weight[place] for weight, place in zip(weights, self.places(), strict=True)]
        return torch.cat(rows).to(dtype)

    def project(self, x: Tensor, weight: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
        """Return queries, keys and values as (batch, heads, tokens, size), views of one tensor."""
        added = None
        if any(bias is not None for bias in biases):
            added = torch.cat(
                [
                    weight.new_zeros(size) if bias is None else bias[place].to(weight.dtype)
                    for bias, place, size in zip(biases, self.places(), self.sizes(), strict=True)
                ]
            )
        made = F.linear(x, weight, added)
        return [self.as_heads(each) for each in made.split(self.sizes(), -1)]

    def as_heads(self, flat: Tensor) -> Tensor:
        heads: Tensor = flat.unflatten(-1, (-1, self.plan.heads.size)).transpose(1, 2)
        return heads

    def turn(self, q: Tensor, k: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return queries and keys as attention has them, in their type: autocast may widen it."""
        return tuple(each.to(q.dtype) for each in self.plan.heads.between(q, k, *learned))


def _flat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


class _Groups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, mask: Tensor | None, x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        weights, biases, learned = _split(tensors)
        width = plan.parts * plan.queries * plan.heads.size
        y = x.new_empty(*x.shape[:2], width)
        sums = []
        for group in plan.groups():
            q, k, v = group.project(x, group.weight(weights[:3], x.dtype), biases[:3])
            q, k = group.turn(q, k, learned)
            made, total, *_ = kernels.forward(plan.call, (q, k, v), mask)
            y[..., group.of_queries] = _flat(made)
            sums.append(total)
            del q, k, v, made
        ctx.plan, ctx.count = plan, len(tensors)
        ctx.save_for_backward(x, y, mask, *tensors, *sums)
        bias = None if biases[3] is None else biases[3].to(x.dtype)
        # In memory of its own: a view that a function returns may not be written into.
        result = x.new_empty(*x.shape[:2], len(weights[3]))
        project_into(
            result.flatten(0, 1), y.flatten(0, 1), weights[3].to(x.dtype), bias, residual=None
        )
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dresult,) = gradients
        x, y, mask, *saved = ctx.saved_tensors
        tensors, sums = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled():
            found = differentiable_gradients(
                lambda *inputs: _in_whole(ctx.plan, mask, *inputs), [x, *tensors], dresult
            )
            return None, None, *found
        needs = ctx.needs_input_grad[2:]
        return None, None, *_gradients(ctx.plan, mask, (x, y, sums), tensors, dresult, needs)


def _split(tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return what is of weights, of biases and of the parameters that heads go through."""
    terms = tensors[: 2 * _PROJECTIONS]
    return list(terms[::2]), list(terms[1::2]), list(tensors[2 * _PROJECTIONS :])


def _gradients(
    plan: _Plan,
    mask: Tensor | None,
    kept: tuple[Tensor, Tensor, list[Tensor]],
    tensors: Sequence[Tensor | None],
    dresult: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of x and of tensors, those of `needs`."""
    x, y, sums = kept
    weights, biases, learned = _split(tensors)
    rows, values, drows = (each.flatten(0, 1) for each in (x, y, dresult))
    dx = x.new_empty(x.shape) if needs[0] else None  # contiguous, to be written as rows
    found = [
        torch.empty_like(each) if each is not None and need else None
        for each, need in zip(tensors, needs[1:], strict=True)
    ]
    dweights, dbiases, dlearned = _split(found)
    sums_learned = [None if each is None else each.zero_() for each in dlearned]
    outer = weights[3].to(x.dtype)
    for group, total in zip(plan.groups(), sums, strict=True):
        part = group.of_queries
        weight = group.weight(weights[:3], x.dtype)
        dy = group.as_heads((drows @ outer[:, part]).view(*dresult.shape[:2], -1))
        dheads, own = _gradients_of_heads(group, mask, (x, weight, biases), (y, total, dy), learned)
        del dy
        if dweights[3] is not None:
            dweights[3][:, part] = drows.t() @ values[:, part]
        for added, each in zip(sums_learned, own, strict=True):
            if added is not None:
                added.add_(each)
        _add_projections(group, dheads, rows, (dweights[:3], dbiases[:3]))
        if dx is not None and part.start == 0:
            torch.mm(dheads, weight, out=dx.flatten(0, 1))
        elif dx is not None:
            dx.flatten(0, 1).addmm_(dheads, weight)
        del dheads  # before the next are made
    if dbiases[3] is not None:
        dbiases[3].copy_(bias_gradient(drows, dbiases[3].dtype))
    return [dx, *found]


def _gradients_of_heads(
    group: _Group,
    mask: Tensor | None,
    source: tuple[Tensor, Tensor, Sequence[Tensor | None]],
    attended: tuple[Tensor, Tensor, Tensor],
    learned: Sequence[Tensor],
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the gradients of what the projections made, one matrix, and of what is learned.

    `source` is what they are made of; `attended` is attention's whole result, what its kernel kept
    of the group, and the gradient of the group's part.
    """
    x, weight, biases = source
    y, total, dy = attended
    q, k, v = group.project(x, weight, biases[:3])
    came = [each.detach().requires_grad_() for each in (q, k, *learned)]
    with torch.enable_grad():
        q, k = turned = group.turn(came[0], came[1], came[2:])
    heads = q.detach(), k.detach(), v, group.as_heads(y[..., group.of_queries])
    state = total, None, None
    dq, dk, dv = kernels.backward(group.plan.call, dy, heads, mask, state)
    del q, k, v, heads
    dq, dk, *own = torch.autograd.grad(turned, came, (dq, dk))
    return torch.cat([_flat(each) for each in (dq, dk, dv)], -1).flatten(0, 1), own


def _add_projections(
    group: _Group,
    dheads: Tensor,
    rows: Tensor,
    into: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
) -> None:
    """Write the gradients of the rows that make a group's heads."""
    dweights, dbiases = into
    if any(each is not None for each in dweights):
        made = (dheads.t() @ rows).split(group.sizes())
        for total, place, each in zip(dweights, group.places(), made, strict=True):
            if total is not None:
                total[place] = each
    dtypes = [each.dtype for each in dbiases if each is not None]
    if dtypes:
        made = bias_gradient(dheads, dtypes[0]).split(group.sizes())
        for total, place, each in zip(dbiases, group.places(), made, strict=True):
            if total is not None:
                total[place] = each


def _in_whole(plan: _Plan, mask: Tensor | None, x: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return the result by operations that have derivatives of any order."""
    weights, biases, learned = _split(tensors)
    weights = [weight.to(x.dtype) for weight in weights]
    biases = [None if bias is None else bias.to(x.dtype) for bias in biases]
    made = (F.linear(x, w, b) for w, b in zip(weights[:3], biases[:3], strict=True))
    q, k, v = (each.unflatten(-1, (-1, plan.heads.size)).transpose(1, 2) for each in made)
    q, k = plan.heads.between(q, k, *learned)
    y = _flat(kernels.in_whole_matrices(plan.call, (q, k, v), mask))
    return F.linear(y, weights[3], biases[3])
