"""The operators of a unit with the Linear behind it.

    vramx::unit_linear           the result, the side's product, packs of the inputs, their probes
    vramx::unit_linear_backward  the gradients of all, from the packs

The unit is an activation of `first`, or that times `up`. Without a weight the result is the unit's.
`side`, `key` and `level` are a Drawn of sides.py; without a side its product is None. Arguments are
trusted: unit_linear.py checks and casts them. A call never waits; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.nn import activation, differentiation, glu, keeping, passes
from vramx.nn import reference_elementwise as reference
from vramx.nn import sides as beside
from vramx.nn.operators import operator
from vramx.nn.products import fake_weight_gradients, is_unread, project, weight_gradients
from vramx.nn.sides import Drawn


class _Readers(NamedTuple):
    """What reads the unit's result."""

    weight: Tensor | None
    side: Drawn | None


def _readers(
    weight: Tensor | None, side: Tensor | None, key: Tensor | None, level: int
) -> _Readers:
    return _Readers(weight, None if side is None else Drawn(side, key, level))


@operator(
    "vramx::unit_linear",
    schema="(Tensor first, Tensor? up, Tensor? weight, Tensor? bias, Tensor? residual, "
    "Tensor? side, Tensor? key, int level, str kind, int[] form) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def unit_linear_operator(
    first: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    side: Tensor | None,
    key: Tensor | None,
    level: int,
    kind: str,
    form: Sequence[int],
) -> tuple[Tensor | None, ...]:
    """Return the result, the side's product, the two packs, and the two probes."""
    inside = _present(first, up)
    if form[0] == keeping.NOTHING and side is None and is_unread(residual):
        value, packs = first, [keeping.encode(each, form) for each in inside]
    elif up is None:
        value, *packs = activation.forward_pass(first, kind, form)
    else:
        value, *packs = glu.forward_pass(first, up, kind, form)
    result = value if weight is None else project(value, weight, bias, residual)
    h = None if side is None else beside.product(value, Drawn(side, key, level))
    probes = differentiation.probes_of(inside, form)
    return result, h, *_two(packs), *_two(probes)


@unit_linear_operator.register_fake
def _(
    first: Tensor, up: Tensor | None, weight: Tensor | None, _bias: Any, _residual: Any,
    side: Tensor | None, _key: Any, _level: int, _kind: str, form: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    inside, shape = _present(first, up), first.shape[:-1]
    none = first.new_empty(0)
    packs = [keeping.empty_buffer(each, form) for each in inside]
    probes = differentiation.probes_of(inside, form)
    return (
        first.new_empty(first.shape if weight is None else (*shape, weight.shape[0])),
        none if side is None else side.new_empty((*shape, side.shape[0])),
        *(first.new_empty(0) if each is None else each for each in (*_two(packs), *_two(probes))),
    )


def _present(first: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    return (first,) if up is None else (first, up)


def _two(found: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    return found[0], found[1] if len(found) > 1 else None


@operator(
    "vramx::unit_linear_backward",
    schema="(Tensor first, Tensor? up, Tensor? dresult, Tensor? dproduct, Tensor? weight, "
    "Tensor? side, Tensor? key, int level, SymInt[] shape, str kind, int[] form, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _unit_linear_backward(
    first: Tensor,
    up: Tensor | None,
    dresult: Tensor | None,
    dproduct: Tensor | None,
    *others: Any,
) -> tuple[Tensor | None, ...]:
    *readers, shape, kind, form, needs = others
    incoming = (dresult, dproduct)
    return _gradients(_present(first, up), incoming, _readers(*readers), (kind, form), needs, shape)


def _gradients(
    kept: Sequence[Tensor],
    incoming: tuple[Tensor | None, Tensor | None],
    readers: _Readers,
    how: tuple[str, Sequence[int]],
    needs: Sequence[bool],
    shape: Sequence[int],
    in_place: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, the weight, the bias, and the side.

    `incoming`: of the result and of the side's product, not both None; `needs`: of the weight, the
    bias and the side; `shape` is the inputs'; `in_place` allows to write over what was kept.
    """
    rows, of_side = (None if g is None else g.reshape(-1, g.shape[-1]) for g in incoming)
    weight, side = readers
    needs_weight, needs_bias = (need and rows is not None for need in needs[:2])
    needs_side = needs[2] and of_side is not None
    dvalue = _value_gradient(rows, of_side, readers)
    passed: Any = glu.backward_pass if len(kept) > 1 else activation.backward_pass
    packs: Any = kept if len(kept) > 1 else kept[0]
    wants = needs_weight or needs_side
    found, value = passed(dvalue, packs, how, with_value=wants, in_place=in_place)
    dweight = dbias = dside = None
    if weight is not None and rows is not None:
        dweight, dbias = weight_gradients(rows, value, weight, (needs_weight, needs_bias))
    if needs_side and side is not None and of_side is not None:
        dside = beside.weight_gradient(of_side, value, side)
    slopes: Any = found if len(kept) > 1 else (found,)
    return *_two([slope.view(shape) for slope in slopes]), dweight, dbias, dside


def _value_gradient(
    rows: Tensor | None,
    of_side: Tensor | None,
    readers: _Readers,
) -> Tensor:
    """Return the gradient of the unit's result, in memory that may be written over if wanted."""
    weight, side = readers
    dvalue = rows if rows is None or weight is None else rows @ weight
    if of_side is None or side is None:
        assert dvalue is not None
        return dvalue.contiguous()
    dtype = of_side.dtype if dvalue is None else dvalue.dtype
    ours = weight is not None
    return beside.add_input_gradient(dvalue, of_side, side, dtype, in_place=ours)


@_unit_linear_backward.register_fake
def _(
    first: Tensor, up: Tensor | None, dresult: Tensor | None, dproduct: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    weight, side, _, _, shape, _, _, needs = others
    like = dresult if dresult is not None else dproduct
    assert like is not None
    second = first.new_empty(0) if up is None else like.new_empty(shape)
    dweight, dbias, dside = (first.new_empty(0) for _ in range(3))
    if weight is not None and dresult is not None:
        dweight, dbias = fake_weight_gradients(weight, needs)
    if needs[2] and dproduct is not None:
        dside = torch.empty_like(side)
    return like.new_empty(shape), second, dweight, dbias, dside


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    first, up, weight, bias, residual, side, key, ctx.level, ctx.kind, ctx.form = inputs
    ctx.adds = residual is not None
    ctx.is_made_again = passes.saves_are_unread()
    inside = _present(first, up)
    ctx.count = count = len(inside)
    kept = (*output[2 : 2 + count], *output[4 : 4 + count])
    differentiation.save(ctx, inside, kept, weight, bias, side, key)


def _differentiate(
    ctx: Any,
    dresult: Tensor | None,
    dproduct: Tensor | None,
    _: Any,
    __: Any,
    *dprobes: Tensor | None,
) -> tuple[Any, ...]:
    none = (None,) * 8
    if dresult is None and dproduct is None:
        return *dprobes, *none
    # Read once: a checkpoint gives each tensor once.
    saved = ctx.saved_tensors
    kept, probes = saved[: ctx.count], saved[ctx.count : 2 * ctx.count]
    weight, bias, side, key = saved[2 * ctx.count :]
    _, _, needs_weight, needs_bias, _, needs_side, *_ = ctx.needs_input_grad
    needs, how = [needs_weight, needs_bias, needs_side], (ctx.kind, ctx.form)
    first, up = _two(kept)
    found: Sequence[Any]
    if torch.is_grad_enabled():
        found = _differentiable(ctx, kept, probes, (weight, bias, side, key), (dresult, dproduct))
    elif ctx.is_made_again and passes.may_be_overwritten(*kept):
        held = [each.detach() for each in kept]
        readers = _readers(weight, side, key, ctx.level)
        incoming = (dresult, dproduct)
        found = _gradients(held, incoming, readers, how, needs, ctx.shape, in_place=True)
    else:
        found = _unit_linear_backward(
            first, up, dresult, dproduct, weight, side, key, ctx.level, list(ctx.shape), *how, needs
        )
    *slopes, dweight, dbias, dside = found
    slopes = slopes if ctx.count > 1 else [slopes[0], None]
    came = dresult is not None
    return (
        *map(differentiation.add, slopes, dprobes),
        dweight if needs_weight and came else None,
        dbias if needs_bias and came else None,
        dresult if ctx.adds else None,
        dside if needs_side and dproduct is not None else None,
        *(None,) * 4,
    )


def _differentiable(
    ctx: Any,
    kept: Sequence[Tensor],
    probes: Sequence[Tensor],
    terms: Sequence[Tensor | None],
    incoming: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the same gradients by operations that have gradients themselves."""
    weight, bias, side, key = terms

    def function(*inputs: Any) -> tuple[Tensor, ...]:
        *inside, w, b, a = inputs
        value = (
            reference.glu(inside[0], inside[1], ctx.kind)
            if len(inside) > 1
            else reference.activation(inside[0], ctx.kind)
        )
        made = (
            value if w is None else F.linear(value, w, b),
            None if a is None else beside.product(value, Drawn(a, key, ctx.level)),
        )
        pairs = zip(made, incoming, strict=True)
        return tuple(each for each, gradient in pairs if each is not None and gradient is not None)

    inside = differentiation.attached(ctx, kept, probes)
    found = differentiation.differentiable_gradients(
        function, (*inside, weight, bias, side), [g for g in incoming if g is not None]
    )
    return *_two(found[: ctx.count]), *found[ctx.count :]  # type: ignore[arg-type]


unit_linear_operator.register_autograd(_differentiate, setup_context=_save)
