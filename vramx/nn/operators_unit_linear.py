"""The operators of a unit with the Linear behind it.

    vramx::unit_linear           the result, the side's product, packs of the inputs, their probes
    vramx::unit_linear_backward  the gradients of all, from the packs

The unit is an activation of `first`, or that times `up`. Without a weight the result is the unit's;
`side`, `key` and `level` are a Drawn of sides.py; without a side its product is None. readers.py
has what is done with both. Arguments are trusted: unit_linear.py checks and casts them. A call
never waits; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.nn import activation, differentiation, glu, keeping, passes
from vramx.nn import reference_elementwise as reference
from vramx.nn.operators import operator
from vramx.nn.products import is_unread
from vramx.nn.readers import Incoming, Readers


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
        value, packs = first, [keeping.pack_of(each, form) for each in inside]
    elif up is None:
        value, *packs = activation.forward_pass(first, kind, form)
    else:
        value, *packs = glu.forward_pass(first, up, kind, form)
    readers = Readers.of(weight, bias, side, key, level)
    probes = differentiation.probes_of(inside, form)
    return *readers.results(value, residual), *_two(packs), *_two(probes)


@unit_linear_operator.register_fake
def _(
    first: Tensor, up: Tensor | None, weight: Tensor | None, bias: Tensor | None, _residual: Any,
    *others: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    *side, _, form = others
    inside = _present(first, up)
    packs = [keeping.empty_pack_of(each, form) for each in inside]
    probes = differentiation.probes_of(inside, form)
    return *Readers.of(weight, bias, *side).fake_results(first), *_two(packs), *_two(probes)


def _present(first: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    return (first,) if up is None else (first, up)


def _two(found: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    return found[0], found[1] if len(found) > 1 else None


@operator(
    "vramx::unit_linear_backward",
    schema="(Tensor first, Tensor? up, Tensor? dresult, Tensor? dproduct, Tensor? weight, "
    "Tensor? bias, Tensor? side, Tensor? key, int level, SymInt[] shape, str kind, int[] form, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _unit_linear_backward(
    first: Tensor,
    up: Tensor | None,
    dresult: Tensor | None,
    dproduct: Tensor | None,
    *others: Any,
) -> tuple[Tensor | None, ...]:
    *readers, shape, kind, form, needs = others
    kept, how = _present(first, up), (kind, form)
    return _gradients(kept, (dresult, dproduct), Readers.of(*readers), how, needs, shape)


def _gradients(
    kept: Sequence[Tensor],
    incoming: Incoming,
    readers: Readers,
    how: tuple[str, Sequence[int]],
    needs: Sequence[bool],
    shape: Sequence[int],
    in_place: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, the weight, the bias, and the side.

    `needs`: of the weight, the bias and the side; `shape` is the inputs'; `in_place` allows to
    write over what was kept.
    """
    dvalue, wants = readers.value_gradient(incoming), readers.reads(incoming, needs)
    passed: Any = glu.backward_pass if len(kept) > 1 else activation.backward_pass
    packs: Any = kept if len(kept) > 1 else kept[0]
    found, value = passed(dvalue, packs, how, with_value=wants, in_place=in_place)
    slopes: Any = found if len(kept) > 1 else (found,)
    own = readers.own_gradients(incoming, value, needs)
    return *_two([slope.view(shape) for slope in slopes]), *own


@_unit_linear_backward.register_fake
def _(
    _first: Tensor, up: Tensor | None, dresult: Tensor | None, dproduct: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    *readers, shape, _, _, needs = others
    like = dresult if dresult is not None else dproduct
    assert like is not None
    slopes = like.new_empty(shape), None if up is None else like.new_empty(shape)
    return *slopes, *Readers.of(*readers).fake_own_gradients((dresult, dproduct), needs)


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
    terms, incoming = (*saved[2 * ctx.count :], ctx.level), (dresult, dproduct)
    _, _, needs_weight, needs_bias, _, needs_side, *_ = ctx.needs_input_grad
    needs, how = [needs_weight, needs_bias, needs_side], (ctx.kind, ctx.form)
    first, up = _two(kept)
    found: Sequence[Any]
    if torch.is_grad_enabled():
        found = _differentiable(ctx, kept, probes, terms, incoming)
    elif ctx.is_made_again and passes.may_be_overwritten(*kept):
        held = [each.detach() for each in kept]
        readers = Readers.of(*terms)
        found = _gradients(held, incoming, readers, how, needs, ctx.shape, in_place=True)
    else:
        found = _unit_linear_backward(first, up, *incoming, *terms, list(ctx.shape), *how, needs)
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
    terms: Sequence[Any],
    incoming: Incoming,
) -> tuple[Tensor | None, ...]:
    """Return the same gradients by operations that have gradients themselves."""
    weight, bias, side, *mask = terms

    def function(*inputs: Any) -> tuple[Tensor, ...]:
        *inside, w, b, a = inputs
        value = (
            reference.glu(inside[0], inside[1], ctx.kind)
            if len(inside) > 1
            else reference.activation(inside[0], ctx.kind)
        )
        return Readers.of(w, b, a, *mask).wanted(value, incoming)

    inside = differentiation.attached(ctx, kept, probes)
    found = differentiation.differentiable_gradients(
        function, (*inside, weight, bias, side), [g for g in incoming if g is not None]
    )
    return *_two(found[: ctx.count]), *found[ctx.count :]


unit_linear_operator.register_autograd(_differentiate, setup_context=_save)
