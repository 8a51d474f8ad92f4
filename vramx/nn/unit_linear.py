"""An activation or a gated unit with the Linear that follows, in one operator that keeps packs.

torch keeps what goes into the unit and, for the Linear, what comes out of it. Here only the inputs
of the unit are kept, packed; the backward kernel decodes them, makes their gradients, and the
unit's result again for the gradients of weights, all in one pass. The weight of an adapter
(sides.py) reads that result as well, and so does a Linear of another kind (of quantised weights),
which is the caller's: it is given the result. Here arguments are checked and types chosen; the work
is in operators_unit_linear.py. No state; any thread; nothing waits for the device.

Memory, kept: 1.047 bytes an element of each input at 8 bits; weights are referred to. Temporary, in
backward: one tensor of an input's size, which holds first the gradient of the unit's result and
then that result.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vramx.compression.config import Compression
from vramx.errors import refused
from vramx.nn import arguments, keeping
from vramx.nn import sides as beside
from vramx.nn.activation import kind_of
from vramx.nn.operators_unit_linear import unit_linear_operator
from vramx.nn.readers import Behind
from vramx.nn.reference_elementwise import KINDS


def glu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return (act(gate) * up) weight^T + bias + residual and keep only gate and up, packed.

    Args:
        gate: (..., inputs), floating.
        up: the same shape.
        weight: (outputs, inputs): the down projection.
        bias: (outputs,) or None.
        activation: "silu", "gelu" or "gelu_tanh".
        residual: (..., outputs), added to the result; without a bias the sum is rounded once, where
            a product and an addition round twice. None is none.
        keep: how gate and up are kept: None is int8; with level "keep" as they are.

    Raises:
        InvalidValueError: a type, a shape or `activation` is not accepted.

    Memory: keeps the two packed tensors and refers to weight; temporary in backward: one tensor of
        gate's size, which holds first the gradient of z and then z.
    Sync: none.

    Example:
        >>> import torch
        >>> glu_linear(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    return unit_linear((gate, up), activation, Behind(weight, bias, residual), keep)[0]


def gelu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    approximate: str = "none",
    *,
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return gelu(x) weight^T + bias + residual and keep only x, packed.

    Args:
        x: (..., inputs), floating.
        weight: (outputs, inputs).
        bias: (outputs,) or None.
        approximate: "none" or "tanh".
        residual: (..., outputs), added to the result; without a bias the sum is rounded once, where
            a product and an addition round twice. None is none.
        keep: how x is kept: None is int8; with level "keep" as it is.

    Raises:
        InvalidValueError: a tensor's type or shape, or `approximate`, is not accepted.

    Memory: keeps the packed x and refers to weight; temporary in backward: x's size, which holds
        first the gradient of gelu(x) and then gelu(x).
    Sync: none.

    Example:
        >>> import torch
        >>> gelu_linear(torch.zeros(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    return unit_linear((x,), kind_of(approximate), Behind(weight, bias, residual), keep)[0]


def silu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    keep: Compression | None = None,
) -> Tensor:
    """Return silu(x) weight^T + bias + residual and keep only x, packed; see `gelu_linear`.

    Example:
        >>> import torch
        >>> silu_linear(torch.zeros(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    return unit_linear((x,), "silu", Behind(weight, bias, residual), keep)[0]


def unit_linear(
    inside: Sequence[Tensor], kind: str, behind: Behind, keep: Compression | None
) -> tuple[Tensor, Tensor | None]:
    """Return what is made of act(x), or of act(gate) * up, and the product of a side.

    Args:
        inside: (x,), or (gate, up), all (..., inputs).
        kind: "silu", "gelu" or "gelu_tanh".
        behind: see Behind. The second result is None without a side.
        keep: how `inside` is kept.

    Raises:
        InvalidValueError: a type, a shape or `kind` is not accepted.
    """
    if kind not in KINDS:
        raise refused("activation", kind, KINDS)
    weight, bias, residual, side = behind
    if len(inside) == 1:
        arguments.check_floats(x=inside[0], weight=weight, bias=bias)
    else:
        arguments.check_floats(gate=inside[0], up=inside[1], weight=weight, bias=bias)
        arguments.check_same_shape("gate", inside[0], "up", inside[1])
    outside = None
    if weight is not None:
        arguments.check_linear(inside[0].shape, weight, bias)
        bias, (weight, *inside) = arguments.cast_for_linear(bias, weight, *inside)
    inside = arguments.cast_to_common(*inside)
    first, up = (*inside, None)[:2]
    assert first is not None
    if weight is not None:
        residual, outside = arguments.residual_for(first, weight, residual)
    drawn = (None, None, 0) if side is None else beside.draw([side], first)[0]
    inputs = [t for t in (*inside, weight, bias, drawn[0]) if t is not None]
    form = keeping.form_of(keep, *inputs)
    result, h, *_ = unit_linear_operator(first, up, weight, bias, residual, *drawn, kind, form)
    return result if outside is None else result + outside, None if side is None else h
