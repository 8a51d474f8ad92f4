"""The operators of attention, and of attention with the projection behind it.

    vramx::attention           what the readers make of the result; packs and probes of all
    vramx::attention_backward  the gradients of all, from the packs

Without readers (readers.py) the result itself is returned, and its pack, for a projection that is
another operator; with readers as (batch, tokens, heads * size), and no pack: backward computes the
result again for its own sake. With dropout it cannot, and reads what was kept of it. Packs are of
elements in the order (batch, tokens, heads, size), as the results of projections lie in memory.
Arguments are trusted: attention.py checks them. A call never waits; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vramx.errors import FirstDerivativeOnlyError
from vramx.nn import attention_kernels as kernels
from vramx.nn import differentiation, keeping
from vramx.nn.operators import operator
from vramx.nn.products import cast
from vramx.nn.readers import Incoming, Readers

_READERS = "Tensor? weight, Tensor? bias, Tensor? side, Tensor? key, int level"
_CALL = "int kernel, float dropout_p, bool causal, float? scale, int[] form, int[] of_queries"
_COUNT = 5  # of the fields of _READERS


@operator(
    "vramx::attention",
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? mask, {_READERS}, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor)",
)
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    """Return the result and the side's product; the result's buffer and probe.

    Then the buffers of q, k and v, their probes, and what the kernel keeps with the result. What is
    not kept is None: of the result nothing with readers, of the kernel nothing without dropout.
    """
    readers, call, form, of_queries = _taken(others)
    y, *state = kernels.forward(call, (q, k, v), mask)
    forms = (of_queries, of_queries, form)
    packs = [
        None if f[0] == keeping.NOTHING else keeping.encode(_tokens_first(x), f)
        for x, f in zip((q, k, v), forms, strict=True)
    ]  # fmt: skip
    kept = *packs, *_probes((q, k, v), forms), *_state(call, state)
    if readers is None:
        return y, None, keeping.encode(_tokens_first(y), form), _probe(y), *kept
    buffer = keeping.encode(_tokens_first(y), form) if call.dropout_p else None
    return *readers.results(_flat(y), None), buffer, None, *kept


def _state(call: kernels.Call, state: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return what the kernel keeps of a call that cannot be repeated."""
    return state if call.dropout_p else (None,) * len(state)


@attention_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    readers, call, form, of_queries = _taken(others)
    y, *state = kernels.forward(call, (q, k, v), mask)
    forms = (of_queries, of_queries, form)
    packs = [keeping.empty_pack_of(x, f) for x, f in zip((q, k, v), forms, strict=True)]
    kept = *packs, *_probes((q, k, v), forms), *_state(call, state)
    if readers is None:
        return y, None, keeping.empty_buffer(y, form), _probe(y), *kept
    buffer = keeping.empty_buffer(y, form) if call.dropout_p else None
    return *readers.fake_results(_flat(y)), buffer, None, *kept


def _taken(others: Sequence[Any]) -> tuple[Readers | None, kernels.Call, list[int], list[int]]:
    """Return readers, None if there are none, the call, and how values and queries are kept."""
    fields, (*call, form, of_queries) = others[:_COUNT], others[_COUNT:]
    return _readers(fields), kernels.Call(*call), form, of_queries


def _readers(fields: Sequence[Any]) -> Readers | None:
    weight, _, side, *_ = fields
    return None if weight is None and side is None else Readers.of(*fields)


def _probes(tensors: Sequence[Tensor], forms: Sequence[Sequence[int]]) -> tuple[Tensor | None, ...]:
    q, k, v = tensors
    of_queries, _, form = forms
    return *differentiation.probes_of((q, k), of_queries), *differentiation.probes_of((v,), form)


def _probe(y: Tensor) -> Tensor:
    """Return the probe of y as it goes into the output projection."""
    batch, heads, tokens, size = y.shape
    return y.new_empty_strided((batch, tokens, heads * size), (0, 0, 0))


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _flat(y: Tensor) -> Tensor:
    """Return (batch, tokens, heads * size)."""
    return y.transpose(1, 2).flatten(2)


def _heads_of(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Return _flat()'s elements as a tensor (batch, heads, tokens, size) of a shape."""
    batch, heads, tokens, size = shape
    return flat.view(batch, tokens, heads, size).transpose(1, 2)


@operator(
    "vramx::attention_backward",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] result, Tensor? dresult, "
    f"Tensor? dproduct, {_READERS}, {_CALL}, SymInt[] shape, SymInt[] of_keys, ScalarType dtype, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    result: list[Tensor],
    dresult: Tensor | None,
    dproduct: Tensor | None,
    *others: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, the weight, the bias and the side.

    `result` is the result and what the kernel kept with it; empty if these are to be computed
    again. `shape` and `of_keys` are the shapes of q and of the others; `needs` is of the readers.
    """
    readers, call, form, of_queries = _taken(others[:-4])
    shape, of_keys, dtype, needs = others[-4:]
    decoded = (
        _decoded_heads(q, shape, dtype, of_queries),
        _decoded_heads(k, of_keys, dtype, of_queries),
        _decoded_heads(v, of_keys, dtype, form),
    )
    state: Sequence[Tensor | None]
    if result:
        y, *state = result
        y = _decoded_heads(y, shape, dtype, form)
    else:
        y, *state = _result_again(call, decoded, mask)
    if readers is None:
        assert dresult is not None
        return *kernels.backward(call, dresult, (*decoded, y), mask, state), None, None, None
    incoming = (dresult, dproduct)
    dy = _heads_of(cast(readers.value_gradient(incoming), dtype), shape)
    own = readers.own_gradients(incoming, _flat(y).flatten(0, 1), needs)
    return *kernels.backward(call, dy, (*decoded, y), mask, state), *own


def _result_again(
    call: kernels.Call, decoded: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the result that goes with decoded values, and what the kernel keeps with it."""
    return kernels.forward(call, decoded, mask)


@_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, result: list[Tensor], *others: Any
) -> tuple[Tensor | None, ...]:
    readers, call, form, of_queries = _taken(others[2:-4])
    shape, of_keys, dtype, needs = others[-4:]
    incoming = others[:2]
    like = next(each for each in incoming if each is not None).to(dtype)
    as_it_is = of_queries[0] == keeping.NOTHING
    decoded = (
        q if as_it_is else _empty_heads(like, shape),
        k if as_it_is else _empty_heads(like, of_keys),
        v if form[0] == keeping.NOTHING else _empty_heads(like, of_keys),
    )
    dy = _empty_heads(like, shape)
    state: Sequence[Tensor | None]
    if result:
        y, state = _empty_heads(like, shape), result[1:]
    else:
        y, *state = kernels.forward(call, decoded, mask)
    if readers is None:
        return *kernels.backward(call, dy, (*decoded, y), mask, state), None, None, None
    own = readers.fake_own_gradients(incoming, needs)
    return *kernels.backward(call, dy, (*decoded, y), mask, state), *own


def _decoded_heads(
    kept: Tensor, shape: Sequence[int], dtype: torch.dtype, form: Sequence[int]
) -> Tensor:
    """Return what was kept of a tensor (batch, heads, tokens, size)."""
    if form[0] == keeping.NOTHING:
        return kept
    batch, heads, tokens, size = shape
    return keeping.decode(kept, (batch, tokens, heads, size), dtype, form).transpose(1, 2)


def _empty_heads(like: Tensor, shape: Sequence[int]) -> Tensor:
    batch, heads, tokens, size = shape
    return like.new_empty(batch, tokens, heads, size).transpose(1, 2)


# -- Derivatives -----------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    q, k, _, mask, weight, bias, side, key, ctx.level, *call, ctx.form, ctx.of_queries = inputs
    _, _, buffer, _, *kept, sums, seed, offset = output
    packs, probes = kept[:3], kept[3:]
    ctx.set_materialize_grads(False)
    ctx.call, ctx.shape, ctx.of_keys, ctx.dtype = call, q.shape, k.shape, q.dtype
    forms = (ctx.of_queries, ctx.of_queries, ctx.form)
    # torch.library has an empty tensor for what is None.
    as_they_are = [form[0] == keeping.NOTHING for form in forms]
    unused = [probe for probe, each in zip(probes, as_they_are, strict=True) if each]
    constant = (*packs, *unused, buffer, sums, seed, offset)
    ctx.mark_non_differentiable(*[each for each in constant if each is not None])
    saved = [x if each else pack for x, pack, each in zip(inputs, packs, as_they_are, strict=False)]
    probes = [None if each else probe for probe, each in zip(probes, as_they_are, strict=True)]
    result = (buffer, sums, seed, offset) if ctx.call[1] else ()
    ctx.save_for_backward(*saved, *probes, mask, weight, bias, side, key, *result)


def _differentiate(
    ctx: Any,
    dresult: Tensor | None,
    dproduct: Tensor | None,
    _: Any,
    dprobe: Tensor | None,
    *others: Tensor | None,
) -> tuple[Tensor | None, ...]:
    none, dprobes = (None,) * 8, others[3:6]
    if dprobe is not None:
        # The probe stands for y with tokens first and heads flattened.
        of_y = _heads_of(dprobe, ctx.shape)
        dresult = of_y if dresult is None else dresult + of_y
    if dresult is None and dproduct is None:
        return *dprobes, *[None] * 4, *none
    q, k, v, *saved = ctx.saved_tensors
    probes, mask, fields, result = saved[:3], saved[3], (*saved[4:8], ctx.level), saved[8:]
    came = (dresult is not None, dresult is not None, dproduct is not None)
    needs = [need and each for need, each in zip(ctx.needs_input_grad[4:7], came, strict=True)]
    gradients: tuple[Tensor | None, ...]
    if torch.is_grad_enabled():
        kept = tuple(zip((q, k, v), probes, strict=True))
        gradients = _differentiable_backward(ctx, kept, mask, fields, (dresult, dproduct))
    else:
        gradients = _attention_backward(
            q, k, v, mask, list(result), dresult, dproduct, *fields, *ctx.call, ctx.form,
            ctx.of_queries, ctx.shape, ctx.of_keys, ctx.dtype, needs,
        )  # fmt: skip
    heads = map(differentiation.add, gradients[:3], dprobes)
    own = (each if need else None for each, need in zip(gradients[3:], needs, strict=True))
    return *heads, None, *own, *none


def _differentiable_backward(
    ctx: Any,
    kept: tuple[tuple[Tensor, Tensor], ...],
    mask: Tensor | None,
    fields: tuple[Any, ...],
    incoming: Incoming,
) -> tuple[Tensor | None, ...]:
    """Return the same gradients by operations that have gradients themselves.

    `kept` is what was kept of q, k and v, and their probes; `fields` are the readers'.
    """
    call = kernels.Call(*ctx.call)
    if call.dropout_p:
        raise FirstDerivativeOnlyError(
            "scaled_dot_product_attention has no second derivative after dropout: what was dropped "
            "is known to the kernel only; with create_graph=True use dropout_p=0"
        )
    shapes = (ctx.shape, ctx.of_keys, ctx.of_keys)
    forms = (ctx.of_queries, ctx.of_queries, ctx.form)
    heads = [
        x if form[0] == keeping.NOTHING
        else differentiation.attach(_decoded_heads(x, shape, ctx.dtype, form), probe)
        for (x, probe), shape, form in zip(kept, shapes, forms, strict=True)
    ]  # fmt: skip
    *read, key, level = fields

    def function(*inputs: Any) -> tuple[Tensor, ...]:
        q, k, v, weight, bias, side = inputs
        y = kernels.in_whole_matrices(call, (q, k, v), mask)
        readers = _readers((weight, bias, side, key, level))
        return (y,) if readers is None else readers.wanted(_flat(y), incoming)

    came = [gradient for gradient in incoming if gradient is not None]
    return differentiation.differentiable_gradients(function, [*heads, *read], came)


attention_operator.register_autograd(_differentiate, setup_context=_save)
