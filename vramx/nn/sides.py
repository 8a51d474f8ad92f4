"""Weights beside a Linear's own that read the same input: the first of an adapter's two.

A low-rank adapter is B A dropout(x). A is such a weight: its gradient needs the x that the Linear
and its neighbours read, so it reads what is kept of x for all of them, and nothing is kept of what
dropout leaves: backward draws the mask again (dropout.py). Its product is made in A's own type, as
an adapter in float32 on weights of bfloat16 is. Here is what operators do with such weights,
forward and backward; the calls are those of linear.py and unit_linear.py. No state; any thread.

Memory, temporary: with dropout, or in another type than x's, a tensor of x's size a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.errors import InvalidValueError
from vramx.nn import arguments
from vramx.nn.dropout import ALL_KEPT, drop_again, levels_kept, new_key


class Side(NamedTuple):
    """A weight (outputs, inputs), and the probability with which elements of its input are dropped.

    With p = 0 nothing is. 0.0 also where a module does not train.
    """

    weight: Tensor
    p: float = 0.0


class Drawn(NamedTuple):
    """A side as an operator has it: the key of its mask, and how many of 65536 levels it keeps."""

    weight: Tensor
    key: Tensor | None
    level: int

    def drops(self) -> bool:
        """Tell whether anything is dropped."""
        return self.level != ALL_KEPT


def draw(sides: Sequence[Side], x: Tensor) -> list[Drawn]:
    """Check sides against their input, cast them as autocast does, and draw keys.

    Raises:
        InvalidValueError: a shape, a type or a probability is not accepted.
    """
    drawn = []
    for side in sides:
        arguments.check_floats(side=side.weight)
        arguments.check_linear(x.shape, side.weight, None)
        is_autocast = torch.is_autocast_enabled(x.device.type)
        weight = side.weight.to(arguments.autocast_dtype(x)) if is_autocast else side.weight
        level = levels_kept(side.p)
        drawn.append(Drawn(weight, None if level == ALL_KEPT else new_key(x), level))
    return drawn


def joined(sides: Sequence[Side]) -> Side | None:
    """Return several sides as one, whose product is theirs, one behind the other; None of none.

    Raises:
        InvalidValueError: they cannot be: of two masks, or of two types.
    """
    if len(sides) < 2:
        return sides[0] if sides else None
    if not can_join(sides):
        raise InvalidValueError("sides with dropout or of several types are not accepted as one")
    return Side(torch.cat([side.weight for side in sides]))


def can_join(sides: Sequence[Side]) -> bool:
    """Tell whether several sides can be one."""
    if len(sides) < 2:
        return True
    return len({side.weight.dtype for side in sides}) == 1 and not any(s.p for s in sides)


def product(x: Tensor, side: Drawn) -> Tensor:
    """Return dropout(x) weight^T in the weight's type."""
    return F.linear(_dropped(x, side), side.weight)


def weight_gradient(gradient: Tensor, rows: Tensor, side: Drawn) -> Tensor:
    """Return the gradient of a side's weight; `rows` is its input, (tokens, inputs)."""
    return gradient.t() @ _dropped(rows, side)


def add_input_gradient(
    total: Tensor | None, gradient: Tensor, side: Drawn, dtype: torch.dtype, *, in_place: bool
) -> Tensor:
    """Return total + the gradient of a side's input, (tokens, inputs), in a type.

    `in_place` allows to write over the total where nothing is differentiated.
    """
    in_place = in_place and not torch.is_grad_enabled()
    same = gradient.dtype == dtype
    if total is not None and same and not side.drops():
        if in_place:
            return total.addmm_(gradient, side.weight)
        return torch.addmm(total, gradient, side.weight)
    part = gradient @ side.weight
    if side.drops():
        assert side.key is not None
        part = drop_again(part, side.key, side.level, total if same else None)
        if same:
            return part
    part = part.to(dtype)
    if total is None:
        return part
    return total.add_(part) if in_place else total + part


def _dropped(x: Tensor, side: Drawn) -> Tensor:
    x = x.to(side.weight.dtype)
    return x if side.key is None else drop_again(x, side.key, side.level)
