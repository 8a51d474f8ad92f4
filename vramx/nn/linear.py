"""Linears that keep their input packed, and share what a norm before them keeps.

linears() takes a norm's result and any number of weights: nothing is kept but the norm's buffer;
backward decodes the norm's output once, weight and bias applied in the same pass, for the gradients
of all weights. Of a plain tensor they keep one pack. Weights of adapters (sides.py) read the same
input. Products are torch's own. Here arguments are checked and types chosen; the work is in
operators_linear.py. No state; any thread.

Memory, kept: of a norm's result nothing more; of a tensor 1.047 bytes an element at 8 bits.
Temporary, in backward: the decoded input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.nn import arguments, passes
from vramx.nn import sides as beside
from vramx.nn.dropout import ALL_KEPT
from vramx.nn.keeping import (
    AS_IT_IS,
    NOTHING,
    RAW,
    Kept,
    fields_of,
    in_rows,
    kept_tensor,
    spec_for,
)
from vramx.nn.norm import Normed
from vramx.nn.operators_linear import keep_operator, linears_operator
from vramx.nn.products import cast
from vramx.nn.sides import Drawn, Side

Biases = Sequence[Tensor | None]


def linear(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None = None,
    keep: Compression | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Return x weight^T + bias, keeping x packed.

    Arguments and costs as linears()'s, for one weight.

    Example:
        >>> linear(torch.ones(2, 128), torch.ones(3, 128)).shape
        torch.Size([2, 3])
    """
    return linears(x, [weight], [bias], keep, kept)[0]


def linears(
    x: Tensor | Normed,
    weights: Sequence[Tensor],
    biases: Biases | None = None,
    keep: Compression | None = None,
    kept: Kept | None = None,
    *,
    sides: Sequence[Side] = (),
) -> tuple[Tensor, ...]:
    """Return x weight^T + bias for each weight, keeping one pack for all of them.

    Args:
        x: [..., in], a tensor, or the result of rms_norm() or layer_norm(), whose pack is used.
        weights: each [out, in].
        biases: as many, each [out] or None; None is none at all.
        keep: how a plain tensor is kept, as rms_norm()'s; of no meaning for a norm's result. With
            level "keep" it is kept by torch, as torch.nn.functional.linear would.
        kept: what already is kept of a plain tensor, whose elements x must have in their order: as
            scaled_dot_product_attention() says. None: x is packed here.
        sides: weights of adapters, of which each may have its own type and dropout; the products
            of these follow those of weights. With sides there may be no weights.

    Returns:
        Tensors [..., out] of the type of x, or of autocast; of a side of the side's type.

    Raises:
        InvalidValueError: a shape does not fit, or the numbers of weights and biases, or a type:
            without autocast all are of one.

    Memory: see the head of this file. Under autocast the weights' casts are not kept but made
    again. Where no weight needs a gradient nothing is kept.
    Sync: none.
    Error bound: results as torch's own. The weights' gradients are those of an input that is off by
    at most a step of its group, unbiased if rounding is stochastic; the input's gradient is exact.
    Double backward: works, on what was decoded.

    Example:
        >>> from vramx.nn.norm import rms_norm
        >>> normed = rms_norm(torch.randn(4, 128))
        >>> q, k = linears(normed, [torch.randn(128, 128), torch.randn(32, 128)])
        >>> k.shape
        torch.Size([4, 32])
    """
    y = x.y if isinstance(x, Normed) else x
    biases = [None] * len(weights) if biases is None else biases
    if weights or not sides:
        _check(y, weights, biases)
    dtype = arguments.autocast_dtype(y)
    check_types(y, weights, dtype)
    drawn = beside.draw(sides, y) if sides else []
    every = [*weights, *[side.weight for side in drawn]] if drawn else weights
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in every)
    if isinstance(x, Normed):
        kept = x.kept
    check_kept(y, kept)
    y = cast(y, dtype)
    if not learns or (kept and kept.spec.bits == NOTHING):
        kept = None
    # torch would keep what dropout leaves.
    drops = learns and any(side.drops() for side in drawn)
    if learns and passes.saves_are_brief():
        kept = kept_tensor(y, y, AS_IT_IS) if len(every) > 1 else None
    elif learns and kept is None and not isinstance(x, Normed):
        kept = keep_tensor(y, keep)
    if kept is None and drops:
        kept = kept_tensor(y, y, AS_IT_IS)
    if kept is None:
        pairs = zip(weights, biases, strict=True)
        own = [functional.linear(y, weight, bias) for weight, bias in pairs]
        return *own, *(beside.product(y, side) for side in drawn)
    given = without_none(biases, y) if any(bias is not None for bias in biases) else []
    terms = list(weights), given, *_as_lists(weights, drawn, y)
    return tuple(linears_operator(y, *terms, *fields_of(kept), kept.dtype, list(kept.spec)))


class Linear(torch.nn.Linear):
    """torch.nn.Linear that keeps its input packed: the same arguments and parameters.

    Takes a norm's result as well, and then keeps nothing of its own. `keep` as linears() has it.

    Example:
        >>> Linear(128, 3)(torch.ones(2, 128)).shape
        torch.Size([2, 3])
    """

    keep: Compression | None = None

    def forward(self, x: Tensor | Normed) -> Tensor:
        """Return the product, as linear() does."""
        return linear(x, self.weight, self.bias, self.keep)


def without_none(biases: Biases, like: Tensor) -> list[Tensor]:
    """Return biases for an operator, whose lists have no room for None: empty tensors are none."""
    if all(bias is not None for bias in biases):
        return list(biases)  # type: ignore[arg-type]
    none = like.new_empty(0)
    return [none if bias is None else bias for bias in biases]


def _as_lists(weights: Sequence[Tensor], drawn: Sequence[Drawn], like: Tensor) -> tuple[Any, ...]:
    """Return sides, their keys, and the levels of all products, as the operator has them."""
    levels = [ALL_KEPT] * len(weights) + [side.level for side in drawn]
    if not drawn:
        return [], [], levels
    return [s.weight for s in drawn], without_none([s.key for s in drawn], like), levels


def keep_tensor(x: Tensor, keep: Compression | None) -> Kept | None:
    """Return what is kept of a tensor; None if it is to be kept as it is."""
    spec = in_rows(spec_for(keep), x.shape[-1])
    if spec.bits == RAW:
        return None
    buffer, probe = keep_operator(x, list(spec))
    return kept_tensor(buffer, probe, spec)


def _check(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> None:
    arguments.check_floats(x=x)
    if not weights or len(biases) != len(weights):
        raise InvalidValueError(
            f"{len(weights)} weights and {len(biases)} biases are not accepted; accepted is at "
            "least one weight, and a bias or None for each"
        )
    shape = x.shape
    for weight, bias in zip(weights, biases, strict=True):
        arguments.check_linear(shape, weight, bias)


def check_kept(x: Tensor, kept: Kept | None) -> None:
    """Raise unless what is kept is of as many elements as x, on its device."""
    if kept is None or kept.spec.bits == NOTHING:
        return
    if kept.probe.numel() != x.numel() or kept.probe.device != x.device:
        raise InvalidValueError(
            f"kept is of {kept.probe.numel()} elements on {kept.probe.device}; accepted is what is "
            f"kept of x, {x.numel()} elements on {x.device}"
        )


def check_types(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise unless weights are of a type, or autocast will cast them."""
    if torch.is_autocast_enabled(x.device.type):
        return
    for weight in weights:
        if weight.dtype != dtype:
            raise InvalidValueError(
                f"a weight is of {weight.dtype}; accepted without autocast is x's {dtype}"
            )
