"""What reads a value that an operator makes: a Linear behind it, and a side of that Linear.

The value is a unit's or attention's result, which backward has again, so that nobody keeps it for
the Linear. Readers are a Linear and a side (sides.py) as operators have them, forward and backward;
a caller says them as Behind. Products are torch's own. No state; any thread; nothing waits for the
device. Temporary: the casts of a weight where autocast computes in another type than it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vramx.nn import sides as beside
from vramx.nn.products import (
    bias_gradient,
    cast,
    fake_weight_gradients,
    project,
    weight_gradient,
)
from vramx.nn.sides import Drawn, Side

# The gradients of a Linear's result and of a side's product; not both are None.
Incoming = tuple[Tensor | None, Tensor | None]


class Behind(NamedTuple):
    """What reads a value: a weight (outputs, inputs), its bias and a residual; a side.

    Without a weight the value itself is returned, and there are neither bias nor residual.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    side: Side | None = None


class Readers(NamedTuple):
    """A weight and a bias, which are cast to the value's type, and a side; each may be None."""

    weight: Tensor | None
    bias: Tensor | None
    side: Drawn | None

    @staticmethod
    def of(weight: Tensor | None, bias: Tensor | None, *side: Tensor | int | None) -> Readers:
        """Return them from an operator's arguments, of which the last are a Drawn's fields."""
        return Readers(weight, bias, None if side[0] is None else Drawn(*side))  # type: ignore[arg-type]

    def results(self, value: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return value weight^T + bias + residual, or the value; and the side's product."""
        weight, bias, side = self
        h = None if side is None else beside.product(value, side)
        if weight is None:
            return value, h
        bias = None if bias is None else cast(bias, value.dtype)
        return project(value, cast(weight, value.dtype), bias, residual), h

    def wanted(self, value: Tensor, incoming: Incoming) -> tuple[Tensor, ...]:
        """Return those of results() for which there are gradients."""
        pairs = zip(self.results(value, None), incoming, strict=True)
        return tuple(each for each, came in pairs if each is not None and came is not None)

    def fake_results(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return empty tensors of the shapes and types of results()."""
        (weight, _, side), shape = self, value.shape[:-1]
        return (
            value.new_empty(value.shape if weight is None else (*shape, weight.shape[0])),
            None if side is None else side.weight.new_empty((*shape, side.weight.shape[0])),
        )

    def value_gradient(self, incoming: Incoming) -> Tensor:
        """Return the gradient of the value, (tokens, inputs), in memory of its own with a weight.

        So it may be written over then.
        """
        rows, of_side = map(_rows, incoming)
        weight, _, side = self
        dvalue = rows if rows is None or weight is None else rows @ cast(weight, rows.dtype)
        if of_side is None or side is None:
            assert dvalue is not None
            return dvalue.contiguous()
        dtype = of_side.dtype if dvalue is None else dvalue.dtype
        ours = weight is not None
        return beside.add_input_gradient(dvalue, of_side, side, dtype, in_place=ours)

    def reads(self, incoming: Incoming, needs: Sequence[bool]) -> bool:
        """Tell whether own_gradients() reads the value."""
        return any(
            need and came is not None for need, came in zip(needs[::2], incoming, strict=True)
        )

    def own_gradients(
        self, incoming: Incoming, value: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the weight, the bias and the side; those of `needs`, else None.

        `value` is (tokens, inputs).
        """
        rows, of_side = map(_rows, incoming)
        weight, bias, side = self
        dweight, dbias, dside = None, None, None
        if rows is not None and weight is not None and needs[0]:
            dweight = cast(weight_gradient(rows, value, weight), weight.dtype)
        if rows is not None and bias is not None and needs[1]:
            dbias = bias_gradient(rows, bias.dtype)
        if of_side is not None and side is not None and needs[2]:
            dside = beside.weight_gradient(of_side, value, side)
        return dweight, dbias, dside

    def fake_own_gradients(
        self, incoming: Incoming, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return empty tensors of the shapes and types of own_gradients()."""
        (dresult, dproduct), (weight, bias, side) = incoming, self
        dweight, dbias, dside = None, None, None
        if dresult is not None and weight is not None and needs[0]:
            dweight = fake_weight_gradients(weight, (True, False))[0]
        if dresult is not None and bias is not None and needs[1]:
            dbias = torch.empty_like(bias)
        if dproduct is not None and side is not None and needs[2]:
            dside = torch.empty_like(side.weight)
        return dweight, dbias, dside


def _rows(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.reshape(-1, gradient.shape[-1])
