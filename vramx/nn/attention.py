"""Scaled dot product attention that keeps values packed, and its result for the projection behind.

torch keeps q, k, v, the result and a float a row; the output projection that follows shares the
result. Here v is packed, and the result too, for the projection, which takes that pack (linear.py).
q and k stay as they are: an error of theirs passes through an exponential. Backward takes
rowsum(dy y) from dy v^T, and where attention is sharp next to nothing is left: y must be that of
the very v that backward has. So it is computed again, from the decoded v. Dropout cannot be
repeated: with it v and y are kept exactly. The kernels are torch's own,
forward and backward, called by the names that its scaled_dot_product_attention calls; this file
decides which of them takes a call, and what is kept. attention_kernels.py knows how they are
called. No state; any thread; nothing waits for the device. A call is one operator, some tens of
microseconds of host time more than torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import BITS, Compression, rules_of
from vramx.errors import FirstDerivativeOnlyError
from vramx.nn import arguments, differentiation, keeping
from vramx.nn import attention_kernels as kernels
from vramx.nn.keeping import Kept
from vramx.nn.operators import operator

_POLICY_KEY = "scaled_dot_product_attention"


class Attended(NamedTuple):
    """The result of attention: `y`, as torch's; `kept`, for linears(), None if nothing is packed.

    kept holds y's elements in the order (batch, tokens, heads, size of a head): that of
    y.transpose(1, 2).flatten(2), which goes into the output projection.
    """

    y: Tensor
    kept: Kept | None


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    keep: Compression | None = None,
) -> Attended:
    """Attend as torch.nn.functional.scaled_dot_product_attention does, keeping v and y packed.

    Args:
        q: (batch, heads, tokens, size).
        k: (batch, heads of k and v, tokens, size).
        v: as k.
        attn_mask: bool or floating, broadcast to (batch, heads, tokens of q, tokens of k).
        dropout_p: as torch's; masks come from torch's generator, as its own do.
        is_causal: as torch's.
        scale: as torch's.
        enable_gqa: as torch's.
        keep: how v and y are kept: None is int8; with level "keep" all is torch's own. q and k
            are packed too where the policy says so: {"scaled_dot_product_attention:0,1": "int8"}.

    Returns:
        Attended: y, and what linear(y.transpose(1, 2).flatten(2), ..., kept=kept) takes.

    What runs: on CUDA, for bfloat16 and float16 without a mask, cuDNN's kernel where torch itself
    prefers it, without dropout, for 128 tokens and more, or the flash kernel; else the
    memory-efficient one; on a CPU its flash kernel; each only if torch.nn.attention.sdpa_kernel
    lets it. torch's own with nothing changed, and kept None: where nothing is differentiated; for
    other devices and sizes than these kernels have, values of another size than keys, a mask that
    has a gradient or fewer than two dimensions, dropout on a CPU or in a compiled graph, and
    tensors that are not four-dimensional.

    Raises:
        FirstDerivativeOnlyError: in backward with create_graph=True after dropout.

    Memory: keeps q, k, and 1.047 bytes for an element of v and of y at 8 bits. In backward v is
        decoded and y computed again. With dropout v, y and 4 bytes a row are kept as they are.
        Fewer heads of k and v are repeated for the time of a call where the kernel wants as many
        as q has.
    Sync: none.
    Error bound: y is torch's. The gradients are those of a v that is off by at most a step of its
        group (vramx/compression/codec.py).
    Double backward: works, on what was decoded, by torch's formula in whole matrices.

    Example:
        >>> q = torch.randn(2, 4, 8, 16, requires_grad=True)
        >>> attended = scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> attended.y.shape, attended.kept.dtype
        (torch.Size([2, 4, 8, 16]), torch.float32)
    """
    spec = keeping.form_of(keep, q, k, v)
    attn_mask, (q, k, v) = _cast(attn_mask, q, k, v)
    call = kernels.Call(kernels.NO_KERNEL, dropout_p, is_causal, scale)
    if spec[0] != keeping.NOTHING:
        kernel = kernels.choose((q, k, v), attn_mask, call, enable_gqa)
        call = kernels.Call(kernel, dropout_p, is_causal, scale)
    if dropout_p:
        spec = list(keeping.EXACTLY)
    if call.kernel == kernels.NO_KERNEL:
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return Attended(y, None)
    of_queries = list(keeping.AS_IT_IS) if dropout_p else _form_of_queries(keep)
    y, buffer, probe, *_ = _attention(q, k, v, attn_mask, *_as_arguments(call), spec, of_queries)
    return Attended(y, keeping.kept_tensor(buffer, probe, keeping.Spec(*spec)))


def _cast(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Cast as autocast does."""
    if mask is not None and mask.is_floating_point():
        return arguments.cast_for_linear(mask, *tensors)
    return mask, arguments.cast_for_linear(None, *tensors)[1]


def _form_of_queries(keep: Compression | None) -> list[int]:
    """Return how q and k are kept: as they are, unless a rule of the policy packs both."""
    bits = 0 if keep is None else _bits_of_queries(keep.policy)
    return list(keeping.spec_of(keep, bits) if bits else keeping.AS_IT_IS)


@torch.compiler.assume_constant_result
def _bits_of_queries(policy: Any) -> int:
    first, second = (_bits_of_argument(policy, argument) for argument in (0, 1))
    return max(first, second) if first and second else 0


def _bits_of_argument(policy: Any, argument: int) -> int:
    for rule in rules_of(policy):
        here = rule.operation == _POLICY_KEY and not rule.mask
        if here and (rule.arguments is None or argument in rule.arguments):
            return BITS.get(rule.level, 0)
    return 0


def _as_arguments(call: kernels.Call) -> tuple[int, float, bool, float | None]:
    """Return a call as operators have it."""
    return call.kernel, call.dropout_p, call.causal, call.scale


# -- The operators ---------------------------------------------------------------------------------


@operator(
    "vramx::attention",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, int kernel, float dropout_p, bool causal, "
    "float? scale, int[] form, int[] of_queries) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how: Any
) -> tuple[Tensor, ...]:
    """Return y, its buffer and probe; those of q, k and v; what the kernel keeps."""
    *call, form, of_queries = how
    y, *state = kernels.forward(kernels.Call(*call), (q, k, v), mask)
    forms = (of_queries, of_queries, form)
    packs = (keeping.encode(_tokens_first(x), f) for x, f in zip((q, k, v), forms, strict=True))
    probes = _probes((q, k, v), forms)
    return y, keeping.encode(_tokens_first(y), form), _probe(y), *packs, *probes, *state


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how: Any) -> tuple[Tensor, ...]:
    *call, form, of_queries = how
    y, *state = kernels.forward(kernels.Call(*call), (q, k, v), mask)
    forms = (of_queries, of_queries, form)
    packs = (keeping.empty_buffer(x, f) for x, f in zip((q, k, v), forms, strict=True))
    probes = _probes((q, k, v), forms)
    return y, keeping.empty_buffer(y, form), _probe(y), *packs, *probes, *state


def _probes(tensors: Sequence[Tensor], forms: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    q, k, v = tensors
    of_queries, _, form = forms
    return *differentiation.probes_of((q, k), of_queries), *differentiation.probes_of((v,), form)


def _probe(y: Tensor) -> Tensor:
    """Return the probe of y as it goes into the output projection."""
    batch, heads, tokens, size = y.shape
    return y.new_empty_strided((batch, tokens, heads * size), (0, 0, 0))


def _tokens_first(x: Tensor) -> Tensor:
    """Return (batch, tokens, heads, size): as the result of a projection lies in memory."""
    return x.transpose(1, 2)


@operator(
    "vramx::attention_backward",
    schema="(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] result, "
    "SymInt[] of_keys, int kernel, float dropout_p, bool causal, float? scale, int[] form, "
    "int[] of_queries) -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `of_keys` is the shape of k and v.

    `result` is y and what the kernel kept with it; empty if these are to be computed again.
    """
    result, of_keys, *how, form, of_queries = others
    call = kernels.Call(*how)
    decoded = (
        _decoded_heads(q, dy.shape, dy.dtype, of_queries),
        _decoded_heads(k, of_keys, dy.dtype, of_queries),
        _decoded_heads(v, of_keys, dy.dtype, form),
    )
    if result:
        y, *state = result
        y = _decoded_heads(y, dy.shape, dy.dtype, form)
    else:
        y, *state = _result_again(call, decoded, mask)
    return kernels.backward(call, dy, (*decoded, y), mask, state)


def _result_again(
    call: kernels.Call, decoded: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the result that goes with decoded values, and what the kernel keeps with it."""
    return kernels.forward(call, decoded, mask)


@_attention_backward.register_fake
def _(dy: Tensor, q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    k, _, mask, result, of_keys, *how, _, of_queries = others
    call = kernels.Call(*how)
    as_it_is = of_queries[0] == keeping.NOTHING
    decoded = (
        q if as_it_is else _empty_heads(dy, dy.shape),
        k if as_it_is else _empty_heads(dy, of_keys),
        _empty_heads(dy, of_keys),
    )
    if result:
        y, state = _empty_heads(dy, dy.shape), result[1:]
    else:
        y, *state = kernels.forward(call, decoded, mask)
    return kernels.backward(call, dy, (*decoded, y), mask, state)


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, mask, *call, ctx.form, ctx.of_queries = inputs
    _, buffer, _, *kept, sums, seed, offset = output
    packs, probes = kept[:3], kept[3:]
    ctx.set_materialize_grads(False)
    ctx.call, ctx.of_keys = tuple(call), tuple(k.shape)
    as_they_are = ctx.of_queries[0] == keeping.NOTHING
    without = probes[:2] if as_they_are else ()
    ctx.mark_non_differentiable(buffer, *packs, *without, sums, seed, offset)
    if as_they_are:
        packs[:2] = q, k
    result = (buffer, sums, seed, offset) if ctx.call[1] else ()
    ctx.save_for_backward(*packs, *probes, mask, *result)


def _differentiate(
    ctx: Any, dy: Tensor | None, _: Any, dprobe: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    none, dprobes = (None,) * 7, others[3:6]
    if dprobe is not None:
        # The probe stands for y with tokens first and heads flattened.
        of_y = dprobe.unflatten(-1, (-1, ctx.of_keys[-1])).transpose(1, 2)
        dy = of_y if dy is None else dy + of_y
    if dy is None:
        return *dprobes, *none
    q, k, v, *saved = ctx.saved_tensors
    probes, mask, result = saved[:3], saved[3], saved[4:]
    gradients: tuple[Tensor | None, ...]
    if torch.is_grad_enabled():
        kept = tuple(zip((q, k, v), probes, strict=True))
        gradients = _differentiable_backward(ctx, kept, mask, dy)
    else:
        gradients = _attention_backward(
            dy, q, k, v, mask, list(result), ctx.of_keys, *ctx.call, ctx.form, ctx.of_queries
        )
    return *map(differentiation.add, gradients, dprobes), *none


def _differentiable_backward(
    ctx: Any, kept: tuple[tuple[Tensor, Tensor], ...], mask: Tensor | None, dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the same gradients by operations that have gradients themselves.

    `kept` is what was kept of q, k and v, and their probes.
    """
    call = kernels.Call(*ctx.call)
    if call.dropout_p:
        raise FirstDerivativeOnlyError(
            "scaled_dot_product_attention has no second derivative after dropout: what was dropped "
            "is known to the kernel only; with create_graph=True use dropout_p=0"
        )
    shapes = (dy.shape, ctx.of_keys, ctx.of_keys)
    forms = (ctx.of_queries, ctx.of_queries, ctx.form)
    inputs = [
        x if form[0] == keeping.NOTHING
        else differentiation.attach(_decoded_heads(x, shape, dy.dtype, form), probe)
        for (x, probe), shape, form in zip(kept, shapes, forms, strict=True)
    ]  # fmt: skip
    return differentiation.differentiable_gradients(
        lambda *inputs: kernels.in_whole_matrices(call, inputs, mask), inputs, dy
    )


_attention.register_autograd(_differentiate, setup_context=_save)
