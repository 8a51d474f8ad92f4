"""Scaled dot product attention that keeps values packed, alone or with the projection behind it.

torch keeps q, k, v, the result and a float a row; the output projection that follows shares the
result. Here v is packed. q and k stay as they are: an error of theirs passes through an
exponential. Backward takes rowsum(dy y) from dy v^T, and where attention is sharp next to nothing
is left: y must be that of the very v that backward has. So it is computed again, from the decoded
v, and nobody keeps it for the projection: attention_linear() has that in the same operator. Of
attention alone the result is packed too, for a projection that takes that pack (linear.py). Dropout
cannot be repeated: with it v and y are kept exactly. The kernels are torch's own, forward and
backward, called by the names that its scaled_dot_product_attention calls; this file decides which
of them takes a call, and what is kept. attention_kernels.py knows how they are called, and
operators_attention.py has the operators. No state; any thread; nothing waits for the device. A call
is one operator, some tens of microseconds of host time more than torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vramx.compression import enclosing
from vramx.compression.config import BITS, Compression, rules_of
from vramx.nn import arguments, keeping, linear, passes
from vramx.nn import attention_kernels as kernels
from vramx.nn import sides as beside
from vramx.nn.keeping import Kept
from vramx.nn.operators_attention import attention_operator
from vramx.nn.readers import Behind
from vramx.patch.torch_functions import attention as torchs_attention

Heads = tuple[Tensor, Tensor, Tensor]
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
        group (vramx/compression/codec/codec.py).
    Double backward: works, on what was decoded, by torch's formula in whole matrices.

    Example:
        >>> q = torch.randn(2, 4, 8, 16, requires_grad=True)
        >>> attended = scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> attended.y.shape, attended.kept.dtype
        (torch.Size([2, 4, 8, 16]), torch.float32)
    """
    heads, options = (q, k, v), _Options(attn_mask, dropout_p, is_causal, scale, enable_gqa)
    made = _attend(heads, options, keep, Behind())
    if made is None:
        return Attended(_as_torch_does(heads, options), None)
    (y, _, buffer, probe), form = made
    return Attended(y, keeping.kept_tensor(buffer, probe, keeping.Spec(*form)))


def attention_linear(
    heads: Heads,
    behind: Behind,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    keep: Compression | None = None,
    values: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return a projection of attention's result, and the product of a side of it.

    Args:
        heads: q, k and v, as scaled_dot_product_attention() takes them.
        behind: the projection, without a residual, and a side; there may be one of them or none.
            They read the result as (batch, tokens, heads * size), which is what is returned without
            a weight. The second result is None without a side.
        attn_mask: these and what follows as scaled_dot_product_attention() has them.
        values: makes v again in backward, so that nothing is kept of it; None: it is packed. Not
            called in a graph of a compiler, after dropout, and under hooks of others, who would
            not see what is kept.

    Raises:
        InvalidValueError: a type or a shape does not fit.

    Memory: as scaled_dot_product_attention(), but for the result, of which nothing is kept: with
        dropout it is kept exactly.
    Sync: none.
    Error bound: results as torch's own. The projection's gradients are those of attention's result
        for a v that is off by at most a step of its group.
    Double backward: works, on what was decoded.

    Example:
        >>> q = torch.randn(2, 4, 8, 16, requires_grad=True)
        >>> attention_linear((q, q, q), Behind(torch.ones(3, 64)))[0].shape
        torch.Size([2, 8, 3])
    """
    options = _Options(attn_mask, dropout_p, is_causal, scale, enable_gqa)
    made = _attend(heads, options, keep, behind, values)
    if made is not None:
        y, h = made[0][:2]
        if behind.weight is None and behind.side is None:
            y = y.transpose(1, 2).flatten(2)
        return y, None if behind.side is None else h
    y = _as_torch_does(heads, options).transpose(1, 2).flatten(2)
    weights = [] if behind.weight is None else [behind.weight]
    sides = [] if behind.side is None else [behind.side]
    # The result is kept by torch's attention, so that nothing is won by a pack.
    exact = Compression(level="keep")
    found: list[Tensor] = []
    if weights or sides:
        found += linear.linears(y, weights, [behind.bias] * len(weights), exact, sides=sides)
    result = found.pop(0) if weights else y
    return result, found[0] if sides else None


class _Options(NamedTuple):
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _attend(
    heads: Heads,
    options: _Options,
    keep: Compression | None,
    behind: Behind,
    values: Callable[[], Tensor] | None = None,
) -> tuple[tuple[Any, ...], list[int]] | None:
    """Return the operator's first four results, and how values are kept; None: by no kernel."""
    mask, dropout_p, is_causal, scale, enable_gqa = options
    form = keeping.form_of(keep, *heads)
    if form[0] == keeping.NOTHING and not (dropout_p and _precedes_packing(keep)):
        return None
    mask, (q, k, v) = _cast(mask, *heads)
    call = kernels.Call(kernels.NO_KERNEL, dropout_p, is_causal, scale)
    kernel = kernels.choose((q, k, v), mask, call, enable_gqa)
    if kernel == kernels.NO_KERNEL:
        return None
    of_queries = _form_of_queries(keep)
    if dropout_p:
        form, of_queries = list(keeping.EXACTLY), list(keeping.AS_IT_IS)
    rest = (mask, *_checked(behind, q), kernel, dropout_p, is_causal, scale)
    if values is None or dropout_p or not _may_hook():
        return attention_operator(q, k, v, *rest, form, of_queries)[:4], form
    form = list(keeping.AS_IT_IS)
    with _made_again(v, values):
        return attention_operator(q, k, v, *rest, form, of_queries)[:4], form


def _precedes_packing(keep: Compression | None) -> bool:
    """Tell whether a call without gradients may be made again with them, and would pack then.

    So a reentrant checkpoint does. Kernels draw other masks of dropout: it is to have the same one.
    """
    again = not torch.is_grad_enabled() and not passes.saves_are_brief()
    return again and keeping.spec_of(keep).bits != keeping.RAW


def _may_hook() -> bool:
    """Tell whether there are no hooks of others, which ours would hide what is kept from."""
    if torch.compiler.is_compiling() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    return enclosing.is_told() and enclosing.top_hook() is None


def _made_again(v: Tensor, values: Callable[[], Tensor]) -> saved_tensors_hooks:
    place = keeping.place_of(v)

    def note(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        return values if keeping.place_of(tensor) == place else tensor

    return saved_tensors_hooks(note, _open)


def _open(held: Tensor | Callable[[], Tensor]) -> Tensor:
    return held if isinstance(held, Tensor) else held()


def _as_torch_does(heads: Heads, options: _Options) -> Tensor:
    mask, dropout_p, is_causal, scale, enable_gqa = options
    mask, (q, k, v) = _cast(mask, *heads)
    return torchs_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _checked(behind: Behind, q: Tensor) -> tuple[Any, ...]:
    """Return the readers of the result, as the operator has them."""
    weight, bias, _, side = behind
    if weight is None and side is None:
        return None, None, None, None, 0
    batch, heads, tokens, size = q.shape
    if weight is not None:
        arguments.check_floats(weight=weight, bias=bias)
        arguments.check_linear((batch, tokens, heads * size), weight, bias)
        linear.check_types(q, [weight], q.dtype)
    if side is None:
        return weight, bias, None, None, 0
    y = q.new_empty_strided((batch, tokens, heads * size), (0, 0, 0))  # which is not made yet
    return weight, bias, *beside.draw([side], y)[0]


def _cast(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Cast as autocast does."""
    if mask is not None and mask.is_floating_point():
        return arguments.cast_for_linear(mask, *tensors)
    return mask, arguments.cast_for_linear(None, *tensors)[1]


def _form_of_queries(keep: Compression | None) -> list[int]:
    return list(keeping.AS_IT_IS if keep is None else _spec_of_queries(keep))


@keeping.once_for_options
def _spec_of_queries(keep: Compression) -> keeping.Spec:
    """Return how q and k are kept: as they are, unless a rule of the policy packs both."""
    bits = _bits_of_queries(keep.policy)
    return keeping.spec_with(keep, bits) if bits else keeping.AS_IT_IS


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
